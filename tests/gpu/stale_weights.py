"""Weights that are kept quantised and then change in every way a program has: no product is stale.

Each case makes products until the weight is really kept (a case in which it never is has failed),
changes it, and compares the products that follow with fp64 of the weight as it then is. The error of
every output column must be that of the format; the weight as it was would be at least 10 dB worse in
one, which is checked too. Nothing reads the weight between the change and these products: a read
would have it verified. Run for NF4 and fp8, at both levels, forward with few tokens and with many
and backward (dX), each in a process of its own, and again where PyTorch maps its memory piece by
piece. A case that failed says which products since its last weight was kept were left to cuBLAS, and
what became of the copies.

Usage: stale_weights.py, as run.py does, without the preload; or under a preload, with QSHIM_OUT set
and the policy chosen, stale_weights.py ACTION LEVEL SHAPE [CASE...], where SHAPE is the tokens of a
forward product, or dX.
"""
import collections
import concurrent.futures
import ctypes
import functools
import itertools
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import threading

from support import ROOT, bare_environment, counters, decisions, escaped, kept, need

WIDTH, OUT = 2048, 1024
MOST = 200    # products of one weight after which it must be kept
SETTLE = 4    # more of them that use the copy, until what has read the weight is forgotten
USES = 6      # products after a change
LATE = 64     # products after which a write that nothing announced is found
NOT_SUPPORTED = 801  # cudaErrorNotSupported
LIMIT = {"nf4": 11.0, "fp8": 18.0}  # dB of the worst column with 32 tokens; the mean is 20 and 28
APART = 10.0  # dB by which the weight as it was is worse
BACKWARD = "dX"
SEGMENTS = "PYTORCH_CUDA_ALLOC_CONF"  # PyTorch's variable, by which its memory may be mapped
MAPPED = {SEGMENTS: "expandable_segments:True"}
SETTINGS = [(*chosen, {})
            for chosen in itertools.product(LIMIT, ("tracked", "verified"), (32, 512, BACKWARD))]
SETTINGS += [("nf4", "tracked", 32, MAPPED), ("fp8", "tracked", BACKWARD, MAPPED)]
KERNELS = "QS_TEST_STALE_KERNELS"  # the library built from stale_kernels.cu
MESSAGES = "QS_TEST_STALE_MESSAGES"  # the file that this process's stderr is

torch = need("torch")
try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


class Skipped(Exception):
    """This machine cannot run the case; the text says why."""


def uses():
    """Products of this process that used a kept operand so far."""
    return sum(count for _, count in kept(pid=os.getpid()).values())


def passed():
    """Reason -> products of this process that were left to cuBLAS so far."""
    sums = collections.Counter()
    for slot in counters(pid=os.getpid()):
        sums[slot["reason"]] += slot["calls"] - slot["replaced"]
    return +sums


def messages():
    """What qshim said so far: lines, among them one for each copy that is dropped, and why."""
    path = os.environ.get(MESSAGES)
    lines = pathlib.Path(path).read_text().splitlines() if path else []
    return [line for line in lines if line.startswith("qshim")]


def random(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def worst(result, exact):
    """dB of the worst column, that is of one row of the weight; `exact` is in float64."""
    noise = ((result.double() - exact) ** 2).sum(0)
    db = 10 * torch.log10((exact ** 2).sum(0) / noise)
    db[noise == 0] = math.inf
    return float(db.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf).min())


class Trial:
    """The products of one setting. Weights are held to the end unless told otherwise: each has an
    address that no weight had before."""

    def __init__(self, action, level, shape):
        self.limit, self.level, self.held = LIMIT[action], level, []
        self.backward, self.gradients = shape == BACKWARD, {}
        self.x = None if self.backward else random(int(shape), WIDTH)
        self.mark()

    def mark(self):
        """What is told of a case that fails begins here."""
        self.passed, self.told = passed(), len(messages())

    def since(self):
        found = [f"{count} products passed: {reason}"
                 for reason, count in (passed() - self.passed).items()]
        return "; ".join(found + messages()[self.told:]) or "no product passed, no copy dropped"

    def hold(self, tensor):
        self.held.append(tensor)
        return tensor

    def weight(self, out=OUT, hold=True):
        w = random(out, WIDTH)
        return self.hold(w) if hold else w

    def gradient(self, w):
        """dY, of as many tokens as the weight has rows: one 1 or -1 for each, so that each row of
        dX tells of one row of the weight."""
        if len(w) not in self.gradients:
            signs = torch.randn(len(w), device="cuda").sign()
            self.gradients[len(w)] = torch.diag(signs).bfloat16()
        return self.gradients[len(w)]

    def product(self, w):
        """With a column for each row of the weight."""
        if self.backward:
            return torch.mm(self.gradient(w), w).t()
        return torch.nn.functional.linear(self.x, w)

    def exact(self, w):
        """The product in float64."""
        if self.backward:
            return torch.mm(self.gradient(w).double(), w.double()).t()
        return self.x.double() @ w.double().t()

    def is_kept(self, w):
        """Makes a product: did it use a kept operand?"""
        before = uses()
        self.product(w)
        torch.cuda.synchronize()
        return uses() > before

    def keep(self, w):
        """Makes products until the weight is kept and that lasts; returns a copy of it. Where a
        weight had this address before, the first products may still find its copy. It is made anew,
        but if that happens to it too often, more often than at every 16th use, it is dropped, and
        some fifty products pass before the weight is looked at again."""
        old, lasting = w.clone(), 0
        for _ in range(MOST):
            lasting = lasting + 1 if self.is_kept(w) else 0
            if lasting > SETTLE:
                self.mark()
                return old
        raise AssertionError(f"not kept by {SETTLE + 1} in a row of {MOST} products")

    def compare(self, results, w, old=None):
        """Every result must be the product with the weight as it is now, and `old` must not do."""
        exact = self.exact(w)
        found = [worst(result, exact) for result in results]
        for number, db in enumerate(found):
            assert db >= self.limit, f"product {number} after the change: {db:.1f} dB"
        if old is not None:
            stale = worst(self.exact(old), exact)
            limit = min(self.limit, min(found) - APART)
            assert stale < limit, f"the change is too small: stale is {stale:.1f} dB"

    def check(self, w, old=None, late=0):
        """The products from now on, the first `late` of them left out."""
        self.compare([self.product(w) for _ in range(late + USES)][late:], w, old)


# ---- changes in place ---------------------------------------------------------------------------


def changed(change):
    """The case of one weight and one change of it."""
    def case(trial):
        w = trial.weight()
        old = trial.keep(w)
        change(w)
        trial.check(w, old)
    return case


def stepped(kind, **options):
    """One step of an optimizer, of a size that training never has."""
    def change(w):
        parameter = torch.nn.Parameter(w)
        parameter.grad = random(*w.shape)
        kind([parameter], lr=2.0, **options).step()
    return changed(change)


def trained(trial):
    """Steps and products in turn. This decay leaves nothing of what the weight was."""
    w = trial.weight()
    parameter = torch.nn.Parameter(w)
    optimizer = torch.optim.SGD([parameter], lr=2.0, weight_decay=0.5)
    trial.keep(w)
    for _ in range(10):
        old = w.clone()
        parameter.grad = random(*w.shape)
        optimizer.step()
        trial.check(w, old)


def one_element(w):
    w[7, 9] = 80.0


def one_row(w):
    w[3].copy_(random(WIDTH))


def load_state_dict(w):
    module = torch.nn.Linear(WIDTH, OUT, bias=False, device="meta")
    module.weight = torch.nn.Parameter(w)
    module.load_state_dict({"weight": random(OUT, WIDTH)})


def from_pinned(w):
    rows_of(w).copy_(random(ROWS, WIDTH).cpu().pin_memory(), non_blocking=True)


def batched(w):
    torch._foreach_copy_([w, random(16)], [random(*w.shape), random(16)])


def many_times_unchanged(trial):
    """A kernel that has long left the weight as it was changes it: it was no reader."""
    w = trial.weight()
    old = trial.keep(w)
    for _ in range(24):
        w.mul_(1.0)
        trial.product(w)
        torch.cuda.synchronize()
    w.mul_(-0.5)
    trial.check(w, old)


# ---- kernels of other origin --------------------------------------------------------------------

if triton:
    @triton.jit
    def triton_scale(pointer, count, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(pointer + at, mask=at < count)
        tl.store(pointer + at, value * -0.5, mask=at < count)


def by_triton(w):
    if not triton:
        raise Skipped("no triton")
    triton_scale[(triton.cdiv(w.numel(), 1024),)](w, w.numel(), BLOCK=1024)


def build_kernels(folder):
    """The library of stale_kernels.cu, None without a compiler."""
    words = subprocess.run([ROOT / "scripts" / "cuda"], capture_output=True, text=True).stdout
    nvcc = [word.removeprefix("nvcc=") for word in words.split() if word.startswith("nvcc=")]
    library = pathlib.Path(folder) / "libstale_kernels.so"
    if not nvcc:
        return None
    subprocess.run([*nvcc, "-O2", "-arch=native", "-shared", "-cudart=static", "-Xcompiler=-fPIC",
                    "-allow-unsupported-compiler", "-o", library,
                    ROOT / "tests" / "gpu" / "stale_kernels.cu"], check=True)
    return library


@functools.cache
def kernels():
    if not os.environ.get(KERNELS):
        raise Skipped(f"no CUDA compiler, or {KERNELS} not set")
    return ctypes.CDLL(os.environ[KERNELS])


def call(name, *arguments):
    """Calls a function of the library, with addresses and numbers, in the current stream."""
    stream = torch.cuda.current_stream().cuda_stream
    status = kernels()[name](*map(ctypes.c_long, (*arguments, stream)))
    if status == NOT_SUPPORTED:
        raise Skipped(f"{name} is not supported here")
    assert status == 0, f"{name}: CUDA error {status}"


def by_kernel(name):
    return changed(lambda w: call(name, w.data_ptr(), 0, w.numel()))


def by_table(first, count):
    """The address is in no argument: only a look at the weight itself can tell."""
    def case(trial):
        w = trial.weight()
        table = torch.tensor([0, w.data_ptr()], device="cuda")
        old = trial.keep(w)
        call("halve_by_table", table.data_ptr(), first, count)
        trial.check(w, old, late=LATE if trial.level == "tracked" else 0)
        told = sum(escaped(pid=os.getpid()).values())
        assert (told > 0) == (trial.level == "tracked"), f"the host was told {told} times"
    return case


# ---- copies and fills that PyTorch has no call for ----------------------------------------------
# Of a few rows: a product that follows would hardly look at them by itself.

FIRST, ROWS = 700, 2


def rows_of(w):
    return w[FIRST:FIRST + ROWS]


def by_memset(w):
    call("clear_by_memset", w.data_ptr(), FIRST * WIDTH, ROWS * WIDTH)


def copied(copy):
    """The case of rows that `copy` writes from others, in a stream of its own: some copies refuse
    the one that all share."""
    def case(trial):
        w, source = trial.weight(), trial.hold(random(ROWS, WIDTH))
        old = trial.keep(w)
        on_other_stream(lambda: copy(rows_of(w), source))
        trial.check(w, old)
    return case


def by_peer(rows, source):
    """From another device where there is one."""
    if torch.cuda.device_count() > 1:
        source = source.to("cuda:1")
        torch.cuda.synchronize("cuda:1")
    call("copy_by_peer", rows.data_ptr(), rows.device.index, source.data_ptr(),
         source.device.index, rows.nbytes)
    torch.cuda.current_stream().synchronize()  # a source on the other device goes now


def by_batch(rows, source):
    call("copy_by_batch", rows.data_ptr(), source.data_ptr(), rows.nbytes)


def columns_by(name):
    """All but the last eight columns."""
    return copied(lambda rows, source: call(name, rows.data_ptr(), source.data_ptr(), 2 * WIDTH,
                                            2 * (WIDTH - 8), ROWS))


def from_other_device(w):
    if torch.cuda.device_count() < 2:
        raise Skipped("there is one device only")
    rows_of(w).copy_(random(ROWS, WIDTH).to("cuda:1"))


# ---- addresses ----------------------------------------------------------------------------------


def at_address(address, *shape):
    """A new tensor that lies there; others are taken until one does."""
    taken = []
    for _ in range(256):
        taken.append(torch.empty(*shape, device="cuda", dtype=torch.bfloat16))
        if taken[-1].data_ptr() == address:
            return taken[-1]
    raise Skipped("the address was not given again")


def lone_weight(trial):
    """A weight of 16 MiB in an allocation of its own."""
    torch.cuda.empty_cache()
    return trial.weight(4 * OUT, hold=False)


def recycled(fill, rows=4 * OUT):
    """PyTorch's allocator gives the address again, and the driver is told nothing."""
    def case(trial):
        w = lone_weight(trial)
        old, address = trial.keep(w), w.data_ptr()
        del w
        w = at_address(address, rows, WIDTH)
        fill(w)
        trial.check(w, old[:rows])
    return case


def reallocated(trial):
    """Memory goes back to the driver, which gives the same address again."""
    w = lone_weight(trial)
    old, address = trial.keep(w), w.data_ptr()
    del w
    torch.cuda.empty_cache()
    w = at_address(address, 4 * OUT, WIDTH)
    w.copy_(random(4 * OUT, WIDTH).cpu())
    trial.check(w, old)


def strided_view(trial):
    """Columns of a wider matrix, with an offset; what lies beside them may change freely."""
    base = trial.hold(random(OUT, 2 * WIDTH))
    w = base[:, 64:64 + WIDTH]
    old = trial.keep(w)
    base[:, :64].fill_(99.0)
    base[:, 64 + WIDTH:].fill_(99.0)
    trial.check(w)
    trial.keep(w)
    base.mul_(-0.5)
    trial.check(w, old)


def two_in_one_allocation(trial):
    base = trial.hold(random(2 * OUT, WIDTH))
    first, second = base[:OUT], base[OUT:]
    olds = trial.keep(first), trial.keep(second)
    second.copy_(random(OUT, WIDTH))
    trial.check(first)
    trial.check(second, olds[1])
    trial.keep(first), trial.keep(second)
    base.mul_(-0.5)
    trial.check(first, olds[0])
    trial.check(second)


def dequantise_buffer(trial):
    """One buffer for the weights of all layers, each put there before its product. As long as it is
    the same layer, the buffer may well be kept."""
    layers, buffer = [random(OUT, WIDTH) for _ in range(4)], trial.weight()
    buffer.copy_(layers[0])
    trial.keep(buffer)
    results = []
    for turn in range(40):
        buffer.copy_(layers[turn % 4])
        results.append(trial.product(buffer))
    for index, layer in enumerate(layers):
        trial.compare(results[index::4], layer, layers[index - 1])


# ---- products that write a weight ---------------------------------------------------------------


def product_into(w):
    torch.mm(random(OUT, 64), random(64, WIDTH), out=w)


def product_with_bias_into(w):
    torch.addmm(random(WIDTH), random(OUT, 64), random(64, WIDTH), out=w)


def batched_product_into(trial):
    base = trial.hold(random(2, OUT, WIDTH))
    olds = [trial.keep(w) for w in base]
    torch.bmm(random(2, OUT, 64), random(2, 64, WIDTH), out=base)
    for w, old in zip(base, olds):
        trial.check(w, old)


def lora(trial):
    """An adapter is merged, used, and taken out again: by a product into the weight and by a sum."""
    w, up, down = trial.weight(), random(OUT, 8), random(8, WIDTH)
    for merge in (lambda sign: w.addmm_(up, down, alpha=sign),
                  lambda sign: w.add_(up @ down, alpha=sign)):
        for sign in (1.0, -1.0):
            old = trial.keep(w)
            merge(sign)
            trial.check(w, old)


# ---- graphs -------------------------------------------------------------------------------------


def captured(function):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


def updated_by_graph(trial):
    w = trial.weight()
    graph, _ = captured(lambda: w.mul_(-0.5))
    for _ in range(2):
        old = trial.keep(w)
        graph.replay()
        trial.check(w, old)


def copied_by_graph(trial):
    """The graph's node is a copy, and no kernel."""
    w, source = trial.weight(), trial.hold(random(ROWS, WIDTH))
    graph, _ = captured(lambda: rows_of(w).copy_(source))
    old = trial.keep(w)
    graph.replay()
    trial.check(w, old)


def dropped_under_graph(trial):
    """The weight is written before each replay, until its copy does not pay and is dropped; the
    graph still has its address."""
    w = trial.weight()
    trial.keep(w)
    graph, result = captured(lambda: trial.product(w))

    def replay():
        old = w.clone()
        w.copy_(random(OUT, WIDTH))
        graph.replay()
        trial.compare([result], w, old)

    for _ in range(MOST):
        replay()
        trial.is_kept(w)
        if any("is dropped: changing" in line for line in messages()[trial.told:]):
            break
    else:
        raise AssertionError(f"not dropped in {MOST} replays")
    for _ in range(SETTLE):
        replay()


def replayed_after_update(trial):
    """The product was captured while the weight was kept; the update is outside the graph."""
    w = trial.weight()
    old, before = trial.keep(w), uses()
    graph, result = captured(lambda: trial.product(w))
    assert uses() > before, "the captured product uses no kept operand"
    for _ in range(4):
        graph.replay()
    trial.compare([result], w)
    for change in (lambda: w.copy_(random(OUT, WIDTH)), lambda: one_element(w),
                   lambda: w.copy_(random(OUT, WIDTH).cpu())):
        old = w.clone()
        for _ in range(SETTLE):
            graph.replay()
        change()
        graph.replay()
        trial.compare([result], w, old)


def update_and_product_in_one_graph(trial):
    w = trial.weight()
    trial.keep(w)
    graph, result = captured(lambda: trial.product(w.mul_(-0.5)))
    for _ in range(6):
        old = w.clone()
        graph.replay()
        trial.compare([result], w, old)


def updates_between_replays_of_two_graphs(trial):
    """One graph updates, the other multiplies, in turns."""
    w = trial.weight()
    update, _ = captured(lambda: w.mul_(-0.5))
    trial.keep(w)
    graph, result = captured(lambda: trial.product(w))
    for _ in range(6):
        old = w.clone()
        for _ in range(SETTLE):
            graph.replay()
        update.replay()
        graph.replay()
        trial.compare([result], w, old)


# ---- streams and threads ------------------------------------------------------------------------


def on_other_stream(change):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        change()
    torch.cuda.current_stream().wait_stream(stream)


def in_other_thread(change):
    thread = threading.Thread(target=on_other_stream, args=(change,))
    thread.start()
    thread.join()


def swapped(how):
    """Two weights change places."""
    def case(trial):
        first, second = trial.weight(), trial.weight()
        olds = trial.keep(first), trial.keep(second)

        def swap():
            between = first.clone()
            first.copy_(second)
            second.copy_(between)
            between.record_stream(torch.cuda.current_stream())
        how(swap)
        trial.check(first, olds[0])
        trial.check(second, olds[1])
    return case


def used_on_other_stream(trial):
    """The update and the product that follows are both in a stream that never saw the weight."""
    w = trial.weight()
    old = trial.keep(w)
    results = []
    on_other_stream(lambda: (w.mul_(-0.5), results.extend(trial.product(w) for _ in range(USES))))
    trial.compare(results, w, old)


# ---- all of them --------------------------------------------------------------------------------

OPTIMIZERS = {
    f"{kind.__name__}, {how}": stepped(kind, **options)
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
    for how, options in (("for-loop", {"foreach": False}), ("foreach", {"foreach": True}),
                         ("fused", {"fused": True}))}

CASES = OPTIMIZERS | {
    "training steps": trained,
    "data.copy_ of fp32": changed(lambda w: w.data.copy_(torch.randn(*w.shape, device="cuda"))),
    "mul_": changed(lambda w: w.mul_(-0.5)),
    "one element": changed(one_element),
    "one row": changed(one_row),
    "load_state_dict": changed(load_state_dict),
    "copy_ from the host": changed(lambda w: rows_of(w).copy_(random(ROWS, WIDTH).cpu())),
    "copy_ from pinned memory": changed(from_pinned),
    "copy_ on the device": changed(lambda w: w.copy_(random(*w.shape))),
    "copy_ of rows on the device": changed(lambda w: rows_of(w).copy_(random(ROWS, WIDTH))),
    "_foreach_copy_": changed(batched),
    "zero_": changed(lambda w: w.zero_()),
    "zero_ of half": changed(lambda w: w[:OUT // 2].zero_()),
    "a writer that changed nothing for long": many_times_unchanged,
    "a Triton kernel": changed(by_triton),
    "a kernel of a static runtime": by_kernel("halve_by_argument"),
    "a kernel with the address in a struct": by_kernel("halve_by_struct"),
    "a memset": changed(by_memset),
    "a peer copy": copied(by_peer),
    "copy_ from another device": changed(from_other_device),
    "a batch of copies": copied(by_batch),
    "a copy of columns": columns_by("copy_by_rows"),
    "a copy of a box": columns_by("copy_by_box"),
    "a recycled address": recycled(lambda w: w.normal_()),
    "a recycled address, fewer rows": recycled(lambda w: w.normal_(), rows=2 * OUT),
    "a recycled address, copied to": recycled(lambda w: w.copy_(random(*w.shape).cpu())),
    "an address freed and allocated again": reallocated,
    "a view with an offset and a leading dimension": strided_view,
    "two weights in one allocation": two_in_one_allocation,
    "one dequantise buffer for all layers": dequantise_buffer,
    "mm into the weight": changed(product_into),
    "addmm with bias into the weight": changed(product_with_bias_into),
    "bmm into two weights": batched_product_into,
    "LoRA merged and unmerged": lora,
    "a graph that updates": updated_by_graph,
    "a graph that copies": copied_by_graph,
    "a graph captured before the update": replayed_after_update,
    "a graph whose copy is dropped": dropped_under_graph,
    "update and product in one graph": update_and_product_in_one_graph,
    "one graph updates, another multiplies": updates_between_replays_of_two_graphs,
    "swapped on another stream": swapped(on_other_stream),
    "swapped in another thread": swapped(in_other_thread),
    "updated and used on another stream": used_on_other_stream,
}
# A process that found such a write has every weight verified from then on: the first of these is the
# last of the others' process, and the second is alone.
UNSEEN = {
    "a kernel with the address in a table, one row": by_table(5 * WIDTH, WIDTH),
    "a kernel with the address in a table": by_table(0, OUT * WIDTH),
}
ALONE = "a kernel with the address in a table"
CASES |= UNSEEN


def run_case(trial, name):
    """'ok', 'skip' or 'FAIL', and why."""
    trial.mark()
    try:
        with torch.no_grad():
            CASES[name](trial)
        if name not in UNSEEN:
            unseen = [line for line in messages() if "was not seen" in line]
            assert not unseen, "a write that was seen was taken for one that was not"
        return "ok", ""
    except Skipped as why:
        return "skip", f": {why}"
    except Exception as error:  # one case's failure is not the others'
        why = f"{type(error).__name__}: {error}".split("\n")[0]
        return "FAIL", f": {why} ({trial.since()})"


def title(action, level, shape, variables):
    return f"{action} {level} {shape}{', mapped' if SEGMENTS in variables else ''}"


def child(action, level, shape, *names):
    """Runs the cases of one setting, a line each; returns the exit status."""
    torch.manual_seed(0)
    trial, failed, where = Trial(action, level, shape), 0, title(action, level, shape, os.environ)
    for name in names or [case for case in CASES if case != ALONE]:
        word, why = run_case(trial, name)
        failed += word == "FAIL"
        print(f"{word:4} {where}: {name}{why}", flush=True)
    for decision in decisions():
        if decision["reason"] == "error":
            failed += 1
            print(f"FAIL {where}: a step of qshim failed: {decision}", flush=True)
    return 1 if failed else 0


def setting(action, level, shape, variables, names, library, folder):
    """The lines that cases of one setting printed, these or all but ALONE, in a process of its own
    with these variables."""
    folder.mkdir()
    said = folder / "stderr"
    first = os.environ.get("QS_TEST_PRELOAD_FIRST", "")
    environment = bare_environment() | variables
    environment |= {
        "LD_PRELOAD": f"{first} {os.environ['QS_TEST_LIBRARY']}".strip(),
        KERNELS: str(library or ""), MESSAGES: str(said), "QSHIM_OUT": str(folder),
        "QSHIM_QUIET": "1", "QSHIM_LOG": "cache",
        "QSHIM_SET": f"tune.budget_ms=0;default.action={action};cache.validity={level}"}
    with said.open("w") as stderr:
        result = subprocess.run([sys.executable, __file__, action, level, str(shape), *names],
                                text=True, env=environment, stdout=subprocess.PIPE, stderr=stderr)
    print(result.stdout, end="", flush=True)
    for line in said.read_text().splitlines():
        if not line.startswith("qshim"):
            print(line, file=sys.stderr, flush=True)
    lines = result.stdout.splitlines()
    if result.returncode not in (0, 1) or not lines:
        lines.append(f"FAIL {title(action, level, shape, variables)}: exit status "
                     f"{result.returncode}")
    return lines


def main():
    groups = list(itertools.product(SETTINGS, ([], [ALONE])))
    with tempfile.TemporaryDirectory() as folder:
        library = build_kernels(folder)
        with concurrent.futures.ThreadPoolExecutor(len(SETTINGS)) as pool:
            runs = [pool.submit(setting, *chosen, names, library,
                                pathlib.Path(folder) / str(number))
                    for number, (chosen, names) in enumerate(groups)]
        lines = [line for run in runs for line in run.result()]
    failed = [line for line in lines if line.startswith("FAIL")]
    skipped = [line for line in lines if line.startswith("skip")]
    print(f"{len(lines) - len(failed) - len(skipped)} cases passed, {len(skipped)} skipped")
    if failed:
        sys.exit("\n".join([*failed, f"{len(failed)} cases failed"]))


if __name__ == "__main__":
    sys.exit(child(*sys.argv[1:])) if len(sys.argv) > 3 else main()
