"""Data-loader workers forked from a process that uses qshim: they work, and write nothing."""
import os
import pathlib

from support import need, normal, served, sqnr

torch = need("torch")


class Products(torch.utils.data.Dataset):
    """Each sample is made by a small bf16 product on the CPU, as an augmentation might be."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        a = torch.full((8, 8), float(index)).bfloat16()
        return a @ torch.eye(8).bfloat16(), os.getpid()


def product():
    x, w = normal(256, 512, seed=1), normal(512, 256, seed=2)
    assert sqnr((x @ w).double(), x.double() @ w.double()) >= 26


def forked_child_ends_well():
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


product()
assert served() == 1
loader = torch.utils.data.DataLoader(Products(), batch_size=8, num_workers=2,
                                     multiprocessing_context="fork")
workers = set()
for turn in range(2):
    seen = []
    for sample, pid in loader:
        seen += sample[:, 0, 0].tolist()
        workers |= set(pid.tolist())
    assert seen == [float(i) for i in range(64)]
    product()
assert os.getpid() not in workers and len(workers) == 4
forked_child_ends_well()
product()
assert served() == 4
writers = {file.name.split(".")[2] for file in pathlib.Path(os.environ["QSHIM_OUT"]).iterdir()}
assert writers == {str(os.getpid())}, f"processes that wrote: {sorted(writers)}"
