"""The child's end of bench_lib.py: prepares what is asked for, and times it block by block.

A block is `reps` calls between two CUDA events, after a moment of untimed calls that bring the GPU
back to this process. It is timed as an ordinary program would see it, the CPU's part included; where
a call is so short that the CPU could be what is timed, a second pass holds the GPU back until all
launches are queued and so times the GPU alone. The answer is sent when the GPU is idle again.
"""
import gc
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import time
import traceback

from bench_lib import REPLY_FD

WAKE_MS = 1.0         # untimed work at the start of a block
CLOCK_HZ = 2e9        # at least the GPU's, for a wait counted in cycles
ROTATED = 200 << 20   # bytes to rotate through: more than three times the L2 of an H200
MOST_SETS = 24
PASSES = 8            # before a capture: decisions are settled, and weights kept, after six


def is_worker():
    return REPLY_FD in os.environ


# ---- timing -------------------------------------------------------------------------------------


class GpuTimer:
    """Milliseconds a call, by CUDA events."""

    def __init__(self):
        import torch
        self.torch = torch
        self.sleep = getattr(torch.cuda, "_sleep", None)

    def idle(self):
        self.torch.cuda.synchronize()

    def block(self, step, reps, wait_s=0.0):
        """Returns (ms of a call, seconds the CPU took for all); waits on the GPU first if told."""
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        if wait_s:
            self.sleep(int(wait_s * CLOCK_HZ))
        begin = time.perf_counter()
        start.record()
        for _ in range(reps):
            step()
        end.record()
        host = time.perf_counter() - begin
        end.synchronize()
        return start.elapsed_time(end) / reps, host

    def alone(self, step, reps, host_s):
        """The GPU's own time: the launches are all queued before the first of them may run."""
        return self.block(step, reps, wait_s=1.5 * host_s)[0] if self.sleep else None


class Worker:
    """Answers the parent's requests. `build(case)` returns (variants, answers, missing): what can be
    run, as name -> function of one call; what can be asked, as name -> function that returns JSON;
    and what is not to be had, as name -> why."""

    def __init__(self, build, timer, facts):
        self.build, self.timer = build, timer
        self.steps, self.answers, self.ms = {}, {}, {}
        self.facts = facts

    def load(self, case):
        self.steps, self.answers, self.ms = {}, {}, {}
        gc.collect()
        release()
        self.steps, self.answers, missing = self.build(case)
        self.timer.idle()
        return {"missing": missing}

    def step(self, variant):
        if variant not in self.steps:
            raise LookupError("not available here")
        return self.steps[variant]

    def warm(self, variant, ms, reps):
        """Runs until both the time and the repetitions are over."""
        step, spent, done = self.step(variant), 0.0, 0
        while spent < ms or done < reps:
            last, _ = self.timer.block(step, 1)
            spent, done = spent + last, done + 1
        self.ms[variant] = last
        self.timer.idle()
        return {"ms": last, "reps": done}

    def run(self, variant, reps, apart_below, wake=False):
        step = self.step(variant)
        # Longer calls need no waking, and a training step would be a step too many.
        if apart_below or wake:
            self.timer.block(step, max(1, math.ceil(WAKE_MS / max(self.ms[variant], WAKE_MS / 50))))
        self.timer.idle()
        ms, host = self.timer.block(step, reps)
        alone = self.timer.alone(step, reps, host) if ms < apart_below else ms
        self.timer.idle()
        return {"ms": ms, "gpu_ms": ms if alone is None else alone}

    def tell(self, what):
        return {"value": self.answers[what]()}

    def request(self, line):
        request = json.loads(line)
        op = request.pop("op")
        try:
            return {"load": self.load, "warm": self.warm, "run": self.run,
                    "tell": self.tell}[op](**request)
        except Exception as error:  # one column's failure is not the run's
            traceback.print_exc()
            return {"error": first_line(error)}


def first_line(error):
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def serve(build, timer=GpuTimer, facts=None):
    """The main loop of a child, until the parent closes its end."""
    out = os.fdopen(int(os.environ.pop(REPLY_FD)), "w")

    def reply(value):
        out.write(json.dumps(value) + "\n")
        out.flush()

    try:
        worker = Worker(build, timer(), (facts or machine)())
    except Exception as error:
        return reply({"error": str(error)})
    reply(worker.facts)
    for line in sys.stdin:
        reply(worker.request(line))


def release():
    """Gives freed GPU memory back, so that the sides fit beside each other."""
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_available():
        torch.cuda.empty_cache()


def make_all(makers, case):
    """build() for a script whose variants are made one by one: what cannot be made is missing."""
    steps, missing = {}, {}
    for name in case["variants"]:
        try:
            steps[name] = makers[name](case)
        except Exception as error:
            missing[name] = first_line(error)
    return steps, {}, missing


def settle(step, stream):
    """Eager passes in `stream`, each waited for: a library decides about the products and comes to
    keep the weights."""
    for _ in range(PASSES):
        step()
        stream.synchronize()


def captured(step):
    """Captures step() in a CUDA graph; returns the function that replays it."""
    import torch
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        settle(step, stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, stream=stream):
        step()
    return graph.replay


# ---- facts --------------------------------------------------------------------------------------


def cublas_version():
    """As the cuBLASLt in this process says, for example 13.1.0."""
    import ctypes
    for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
        match = re.search(r"/\S*libcublasLt\.so\.\d+\S*$", line)
        if match:
            call = ctypes.CDLL(match[0]).cublasLtGetVersion
            call.restype = ctypes.c_size_t
            number = call()
            return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    return None


def nvidia_smi(*fields):
    """Fields of the first GPU, None each where the command does not say."""
    try:
        line = subprocess.run(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--id=0",
                               "--format=csv,noheader,nounits"], capture_output=True, text=True,
                              env={k: v for k, v in os.environ.items() if k != "LD_PRELOAD"},
                              timeout=30).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        line = ""
    values = [v.strip() for v in line.split(",")]
    return values if len(values) == len(fields) else [None] * len(fields)


def version_of(package):
    """None where it is not installed; asks without importing it."""
    from importlib import metadata
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def machine():
    """What the figures depend on; raises if there is nothing to measure on."""
    import torch
    if not torch.cuda.is_available():
        raise RuntimeError("no CUDA device")
    torch.zeros(16, 16, device="cuda", dtype=torch.bfloat16).mm(
        torch.zeros(16, 16, device="cuda", dtype=torch.bfloat16))  # has cuBLAS loaded
    driver, power, clock = nvidia_smi("driver_version", "power.limit", "clocks.max.sm")
    return {"gpu": torch.cuda.get_device_name(), "driver": driver, "power_limit_w": power,
            "max_clock_mhz": clock, "cuda": torch.version.cuda, "cublas": cublas_version(),
            "torch": torch.__version__, "python": sys.version.split()[0]}


# ---- data ---------------------------------------------------------------------------------------


def normal(*shape, scale=1.0):
    """Random normal bf16: constant data draws less power and flatters."""
    import torch
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale


def ticker():
    """A function that submits one small unrelated kernel. Every program has some between the products
    of one step (attention, a loss, an update of the weights); a loop of nothing but products on
    operands that never change would let qshim use what it quantised again and again, as no program
    can. The kernel is in both sides' times."""
    import torch
    marker = torch.zeros(1, device="cuda")
    return lambda: marker.add_(1.0)


def fp8_operand(*shape):
    """Normal data that fills the range of e4m3, and the scale that undoes it."""
    import torch
    data = normal(*shape)
    amax = data.abs().max().float()
    return (data * (448 / amax)).to(torch.float8_e4m3fn), amax / 448


def fp8_product(rows, columns, depth, fast):
    """A function that multiplies two operands that are fp8 already, each contiguous along the
    dimension summed over, as cuBLASLt wants them; fast accumulation is for forward products."""
    import torch
    (a, a_scale), (b, b_scale) = fp8_operand(rows, depth), fp8_operand(columns, depth)
    return lambda: torch._scaled_mm(a, b.t(), scale_a=a_scale, scale_b=b_scale,
                                    out_dtype=torch.bfloat16, use_fast_accum=fast)


def sets_of(set_bytes):
    """How many sets of operands to rotate through so that none stays in the L2."""
    return max(1, min(MOST_SETS, math.ceil(ROTATED / max(1, set_bytes))))
