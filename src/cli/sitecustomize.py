"""Tells qshim which PyTorch module is running: put on PYTHONPATH by `qshim run --labels=torch`.

Python runs this at its start. It imports nothing of PyTorch's; once the program has, hooks that
are called around every module's forward() hand the module's name to the library. Nothing is stored
in modules, so copies and pickles of them are as without. Compiled regions have the name of the
module around them.
"""

import importlib.machinery
import importlib.util
import os
import sys


# Parts of qualified names that torch.compile, FSDP and activation checkpointing add.
WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


class Labels:
    """Names of modules, and the modules that each thread is in."""

    def __init__(self, push, pop):
        import threading

        self.push, self.pop = push, pop
        self.thread = threading.local()
        self.names = {}  # id(module): (weak reference to it, name)

    def stack(self):
        """The modules this thread is in, the outermost first."""
        try:
            return self.thread.stack
        except AttributeError:
            self.thread.stack = []
            return self.thread.stack

    def known(self, module):
        """The name given to this very module, None if it has none."""
        found = self.names.get(id(module))
        return found[1] if found and found[0]() is module else None

    def give(self, module, name):
        """Names a module until it is gone; its id may be another's afterwards."""
        import weakref

        key = id(module)

        def forget(reference):
            if self.names.get(key, (None,))[0] is reference:
                del self.names[key]

        self.names[key] = (weakref.ref(module, forget), name.encode())

    def walk(self, root):
        """Gives everything below a module its qualified name."""
        for name, module in root.named_modules():
            parts = [part for part in name.split(".") if part not in WRAPPERS]
            self.give(module, ".".join(parts) or type(module).__name__)

    def name(self, module, stack):
        """Modules added later, or used by none of their parents, are found when they first run."""
        if self.known(module) is None:
            self.walk(stack[0] if stack else module)
        if self.known(module) is None:
            self.give(module, type(module).__name__)
        return self.known(module)

    def enter(self, module):
        stack = self.stack()
        name = self.name(module, stack)
        stack.append(module)
        self.push(name)

    def leave(self, module):
        """Ends the module, and those inside that were left by what is not an Exception."""
        stack = self.stack()
        if not any(entered is module for entered in stack):
            return
        while True:
            self.pop()
            if stack.pop() is module:
                return


def library():
    """qs_label_push and qs_label_pop of the preloaded library; called with the GIL held."""
    import ctypes

    process = ctypes.PyDLL(None)
    push, pop = process.qs_label_push, process.qs_label_pop
    push.argtypes, push.restype = [ctypes.c_char_p], None
    pop.argtypes, pop.restype = [], None
    return push, pop


def install(torch):
    """Sets the hooks that are called for all modules."""
    labels = Labels(*library())
    is_compiling = torch.compiler.is_compiling
    hooks = torch.nn.modules.module

    def before(module, args):
        if not is_compiling():
            labels.enter(module)

    def after(module, args, output):
        if not is_compiling():
            labels.leave(module)

    hooks.register_module_forward_hook(after, always_call=True)
    hooks.register_module_forward_pre_hook(before)


def try_install(torch):
    try:
        install(torch)
    except (AttributeError, ImportError, OSError, TypeError) as error:
        print(f"qshim: labels are not available: {error}", file=sys.stderr)


class Watch:
    """Finds torch as it would be found anyway, and comes back when it has been imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or not hasattr(spec.loader, "exec_module"):
            return spec
        execute = spec.loader.exec_module

        def execute_and_install(module):
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                try_install(module)

        spec.loader.exec_module = execute_and_install
        return spec


def run_other():
    """The sitecustomize that would have been run without this one."""
    here = os.path.dirname(os.path.abspath(__file__))
    path = [folder for folder in sys.path if os.path.abspath(folder) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


sys.meta_path.insert(0, Watch())
run_other()
