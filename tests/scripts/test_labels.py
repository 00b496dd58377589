#!/usr/bin/env python3
"""qshim run --labels: what it sets up for a program, and the names that a stand-in for PyTorch's
modules gets, up to the layers in the decision log of products on the emulation."""

import json
import os
import pathlib
import stat
import subprocess
import sys
import tempfile
import unittest

BUILD = pathlib.Path(os.environ.get("QS_TEST_BUILD", "build")).resolve()
QSHIM = BUILD / "qshim"

# As much of PyTorch as the hooks touch: global hooks around forward(), and qualified names.
TORCH = {
    "torch/__init__.py": "from . import compiler, nn\n",
    "torch/compiler.py": "compiling = False\ndef is_compiling(): return compiling\n",
    "torch/nn/__init__.py": "from .modules.module import Module\n",
    "torch/nn/modules/__init__.py": "from . import module\n",
    "torch/nn/modules/module.py": '''
pre, post = [], []

def register_module_forward_pre_hook(hook):
    pre.append(hook)

def register_module_forward_hook(hook, *, always_call=False):
    assert always_call
    post.append(hook)

class Module:
    def named_modules(self, prefix=""):
        yield prefix, self
        for name, child in vars(self).items():
            for part, item in enumerate(child) if isinstance(child, list) else [(None, child)]:
                if isinstance(item, Module):
                    path = name if part is None else f"{name}.{part}"
                    yield from item.named_modules(f"{prefix}.{path}" if prefix else path)

    def __call__(self, *args):
        for hook in pre:
            hook(self, args)
        try:
            result = self.forward(*args)
        except Exception:
            self.end(args, None)
            raise
        self.end(args, result)
        return result

    def end(self, args, result):
        for hook in post:
            hook(self, args, result)
''',
}

# A product of cuBLAS in the module that is running.
PRELUDE = '''
import copy, ctypes, pickle, sys, threading
cuda, blas = ctypes.CDLL("libcudart.so.13"), ctypes.CDLL("libcublas.so.13")
handle, memory, one = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_float(1)
assert not cuda.cudaMalloc(ctypes.byref(memory), ctypes.c_size_t(1 << 16))
assert not blas.cublasCreate_v2(ctypes.byref(handle))

def product():
    p, i, f = ctypes.c_void_p, ctypes.c_int, ctypes.byref(one)
    assert not blas.cublasGemmEx(handle, i(1), i(0), i(16), i(16), i(16), f, memory, i(14), i(16),
                                 memory, i(14), i(16), f, memory, i(14), i(16), i(68), i(-1))

import torch

class Linear(torch.nn.Module):
    def forward(self, *inner):
        product()
        for module in inner:
            module()

class Block(torch.nn.Module):
    def __init__(self):
        self.fc = Linear()

    def forward(self):
        self.fc()

class Model(torch.nn.Module):
    def __init__(self):
        self.layers = [Block(), Block()]
        self.head = Linear()

    def forward(self):
        for layer in self.layers:
            layer()
        self.head()
        product()
'''

MODEL = ["layers.0.fc", "layers.1.fc", "head", "Model"]


class Labels(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.path = pathlib.Path(self.folder.name)
        for name, text in TORCH.items():
            file = self.path / "modules" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        self.environment = {
            "PATH": os.environ["PATH"],
            "TMPDIR": str(self.path),
            "PYTHONPATH": str(self.path / "modules"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "LD_LIBRARY_PATH": str(BUILD / "softcuda"),
            "QSHIM_SET": "tune.budget_ms=0;default.action=native",
        }

    def tearDown(self):
        self.folder.cleanup()

    def qshim(self, *arguments, **environment):
        return subprocess.run(
            [QSHIM, "run", "-o", self.path / "out", *arguments],
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
        )

    def python(self, text, *flags, labels="torch"):
        return self.qshim(f"--labels={labels}", "--", sys.executable, *flags, "-c", text)

    def decided(self):
        """Layers in the order in which they were met, None for none."""
        lines = []
        for log in sorted((self.path / "out").glob("decisions.*.jsonl")):
            lines += [json.loads(line) for line in log.read_text().splitlines()]
        return [line.get("layer") for line in lines if line["t"] == "decision"]

    def layers(self, text):
        result = self.python(PRELUDE + text)
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        return self.decided()

    # ---- names ------------------------------------------------------------------------------

    def test_modules_have_qualified_names(self):
        self.assertEqual(self.layers("product(); Model()(); product()"), [None, *MODEL])

    def test_without_labels_nothing_is_set(self):
        result = self.python(PRELUDE + "Model()(); print(torch.nn.modules.module.pre)", labels="none")
        self.assertEqual(result.stdout, "[]\n")
        self.assertEqual(self.decided(), [None])

    def test_module_inside_itself_and_twice(self):
        self.assertEqual(self.layers("m = Model(); m.head(m.head, m.layers[0]); m()")[0], "Linear")

    def test_modules_added_later_are_found(self):
        text = "m = Model(); m(); m.layers.append(Block()); m(); Linear()()"
        self.assertEqual(self.layers(text), [*MODEL, "layers.2.fc", "Linear"])

    def test_names_of_wrappers_are_left_out(self):
        text = """
class Wrapper(torch.nn.Module):
    def __init__(self, module): self._orig_mod = module
    def forward(self): self._orig_mod()
Wrapper(Model())()
"""
        self.assertEqual(self.layers(text), MODEL)

    def test_exception_ends_the_ranges(self):
        text = """
class Bad(torch.nn.Module):
    def __init__(self): self.fc = Linear()
    def forward(self): self.fc(lambda: 1 / 0)
try: Bad()()
except ZeroDivisionError: product()
"""
        self.assertEqual(self.layers(text), ["fc", None])

    def test_interrupt_is_made_up_for_by_the_module_around(self):
        text = """
def interrupt(): raise KeyboardInterrupt
class Outer(torch.nn.Module):
    def __init__(self): self.fc = Linear()
    def forward(self):
        try: self.fc(interrupt)
        except KeyboardInterrupt: pass
Outer()()
product()
"""
        self.assertEqual(self.layers(text), ["fc", None])

    def test_threads_do_not_share_ranges(self):
        text = """
class Threaded(torch.nn.Module):
    def __init__(self): self.fc = Linear()
    def forward(self):
        thread = threading.Thread(target=product)
        thread.start(); thread.join()
        self.fc()
Threaded()()
"""
        self.assertEqual(self.layers(text), [None, "fc"])

    def test_copies_and_pickles_are_as_without(self):
        text = """
m = Model(); m()
assert set(vars(m)) == {"layers", "head"}
copy.deepcopy(m)(); pickle.loads(pickle.dumps(m))()
"""
        self.assertEqual(self.layers(text), MODEL)

    def test_while_compiling_nothing_is_pushed(self):
        self.assertEqual(self.layers("torch.compiler.compiling = True; Model()()"), [None])

    # ---- what it is set up by ---------------------------------------------------------------

    def test_other_sitecustomize_is_run(self):
        (self.path / "modules" / "sitecustomize.py").write_text("print('other ran')\n")
        result = self.python("import sitecustomize; print(sitecustomize.__file__)")
        self.assertEqual(result.stdout.splitlines()[0], "other ran")
        self.assertIn("modules/sitecustomize.py", result.stdout)

    def test_torch_is_not_imported_by_itself(self):
        self.assertEqual(self.python("import sys; print('torch' in sys.modules)").stdout, "False\n")

    def test_torch_that_is_absent_or_fails_does_so_as_without(self):
        (self.path / "modules" / "torch" / "__init__.py").write_text("raise ValueError('broken')\n")
        result = self.python("""
for i in range(2):
    try: import torch
    except ValueError as error: print(error)
import sys
sys.path[:] = []
try: import torch
except ImportError as error: print(type(error).__name__)
""")
        self.assertEqual(result.stdout, "broken\nbroken\nModuleNotFoundError\n")

    def test_torch_without_the_hooks_is_told(self):
        (self.path / "modules" / "torch" / "compiler.py").write_text("")
        result = self.python("import torch; print('goes on')")
        self.assertEqual(result.stdout, "goes on\n")
        self.assertIn("qshim: labels are not available", result.stderr)

    def test_process_without_the_library_is_told(self):
        text = "import os, sys; del os.environ['LD_PRELOAD']; " \
               "os.execv(sys.executable, [sys.executable, '-c', 'import torch; print(1)'])"
        result = self.python(text)
        self.assertEqual(result.stdout, "1\n")
        self.assertIn("qshim: labels are not available", result.stderr)

    def test_flags_that_leave_it_out_are_told(self):
        for flags in (["-I"], ["-S"], ["-E"], ["-BS"], ["-X", "utf8", "-I"], ["-Wignore", "-I"]):
            result = self.python("print(1)", *flags)
            self.assertIn(f"qshim: labels are not available: python -{flags[-1][-1]}", result.stderr)
            self.assertEqual(result.stdout, "1\n")

    def test_flags_of_the_program_are_its_own(self):
        for command in ([sys.executable, "-Bc", "print(1)", "-I"], ["echo", "-I"],
                        [sys.executable, "-X", "utf8", "-c", "print(1)", "-S"]):
            self.assertEqual(self.qshim("--labels=torch", "--", *command).stderr, "")

    def test_folder_is_private_and_found_again(self):
        for _ in range(2):
            self.python("pass")
        folder = self.path / f"qshim-labels-{os.geteuid()}"
        self.assertEqual(stat.S_IMODE(folder.stat().st_mode), 0o700)
        self.assertEqual([file.name for file in folder.iterdir()], ["sitecustomize.py"])

    def test_folder_of_somebody_else_is_not_used(self):
        folder = self.path / f"qshim-labels-{os.geteuid()}"
        folder.mkdir()
        folder.chmod(0o777)
        result = self.python("import os; print('qshim-labels' in os.environ['PYTHONPATH'])")
        self.assertIn("qshim: labels are not available", result.stderr)
        self.assertEqual(result.stdout, "False\n")
        folder.rmdir()
        folder.symlink_to(self.path / "modules")
        self.assertIn("qshim: labels are not available", self.python("pass").stderr)

    def test_nvtx_injection_is_set_and_the_other_remembered(self):
        show = ["sh", "-c", 'echo "$NVTX_INJECTION64_PATH $QSHIM_NVTX_NEXT"']
        library = str(BUILD / "libqshim.so")
        self.assertEqual(self.qshim("-l", "nvtx", "--", *show).stdout, f"{library} \n")
        other = self.qshim("-l", "nvtx", "--", *show, NVTX_INJECTION64_PATH="tool.so")
        self.assertEqual(other.stdout, f"{library} tool.so\n")
        again = self.qshim("-l", "nvtx", "--", *show, NVTX_INJECTION64_PATH=library,
                           QSHIM_NVTX_NEXT="tool.so")
        self.assertEqual(again.stdout, f"{library} tool.so\n")

    def test_unknown_source_is_a_usage_error(self):
        result = self.qshim("--labels=jax", "--", "true")
        self.assertEqual(result.returncode, 2)
        self.assertIn("not torch, nvtx or none", result.stderr)


if os.environ.get("QS_TEST_PRELOAD_FIRST"):
    print("python is not started with a sanitiser's runtime first")
    sys.exit(77)

if __name__ == "__main__":
    program = unittest.main(exit=False, verbosity=0)
    failed = len(program.result.failures) + len(program.result.errors)
    print(f"{program.result.testsRun - failed} passed, {failed} failed")
    sys.exit(failed > 0)
