# tests/scripts: the benchmarks without a GPU, PyTorch or the library, and labels with a stand-in for
# PyTorch.

CPU_TESTS += $(if $(shell command -v python3),tests/scripts/test_bench.py tests/scripts/test_labels.py)
