# tests/scripts: the benchmarks without a GPU, PyTorch or the library.

CPU_TESTS += $(if $(shell command -v python3),tests/scripts/test_bench.py)
