"""Weights that are kept quantised and then received from another GPU by NCCL: no product is stale.

NCCL's kernels find the buffers that they write in memory of their own, not in their arguments. Two
processes, one for each device, keep a weight, receive another one by each of the collectives in
which weights travel, and compare the products that follow with fp64 of what was received, as
stale_weights.py does. For NF4 and fp8, at both levels. Runs without the preload itself.
"""
import itertools
import os
import pathlib
import subprocess
import sys
import tempfile

from support import bare_environment, library, need, skip

RANKS = 2
LIMIT_S = 120


def received(dist, rank):
    """Name -> what gives the weight other contents on every rank."""
    import stale_weights

    def broadcast(w):
        if rank == 0:
            w.normal_()
        dist.broadcast(w, 0)

    def passed_on(w):
        if rank == 0:
            w.normal_()
            dist.send(w, 1)
        else:
            dist.recv(w, 0)

    return {
        "broadcast": broadcast,
        "send and receive": passed_on,
        "all_reduce": dist.all_reduce,
        "all_gather": lambda w: dist.all_gather_into_tensor(
            w, stale_weights.random(len(w) // RANKS, w.shape[1])),
    }


def work(action, level, shape):
    torch, rank = need("torch"), int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    import torch.distributed as dist
    import stale_weights
    dist.init_process_group("nccl", init_method=os.environ["STORE"], rank=rank, world_size=RANKS)
    trial, failed = stale_weights.Trial(action, level, shape), 0
    with torch.no_grad():
        for name, change in received(dist, rank).items():
            torch.manual_seed(rank)
            stale_weights.CASES[name] = stale_weights.changed(change)
            word, why = stale_weights.run_case(trial, name)
            failed += word != "ok"
            print(f"{word:4} rank {rank}, {action} {level} {shape}: {name}{why}", flush=True)
    dist.destroy_process_group()
    sys.exit(failed > 0)


def environment(folder, rank, action, level):
    return bare_environment() | {
        "LD_PRELOAD": library(), "QSHIM_OUT": str(folder / str(rank)), "QSHIM_QUIET": "1",
        "QSHIM_SET": f"tune.budget_ms=0;tune.file=;default.action={action};cache.validity={level}",
        "RANK": str(rank), "STORE": f"file://{folder}/store", "NCCL_NVLS_ENABLE": "0"}


def run(folder, *setting):
    """What both ranks printed, and how many of them failed."""
    folder.mkdir()
    ranks = [subprocess.Popen([sys.executable, __file__, *setting], text=True,
                              env=environment(folder, rank, *setting[:2]),
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE)
             for rank in range(RANKS)]
    try:
        said = [rank.communicate(timeout=LIMIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    failed = sum(rank.returncode != 0 for rank in ranks)
    lines = [line for out, _ in said for line in out.splitlines()]
    return lines + ([said[0][1][-1000:], said[1][1][-1000:]] if failed else []), failed


def main():
    if need("torch").cuda.device_count() < RANKS:
        skip("there is one device only")
    passed, failed = 0, []
    with tempfile.TemporaryDirectory() as name:
        settings = itertools.product(("nf4", "fp8"), ("tracked", "verified"), ("32", "512"))
        for number, setting in enumerate(settings):
            lines, wrong = run(pathlib.Path(name) / str(number), *setting)
            passed += sum(line.startswith("ok") for line in lines)
            failed += [line for line in lines if not line.startswith("ok")] if wrong else []
    print(f"{passed} cases passed")
    if failed or not passed:
        sys.exit("\n".join(failed) or "nothing ran")


if __name__ == "__main__":
    work(*sys.argv[1:]) if len(sys.argv) > 1 else main()
