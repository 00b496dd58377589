# tests/scripts: the benchmarks without a GPU, PyTorch or the library, what programs of the GPU suite
# conclude, and labels with a stand-in for PyTorch.

CPU_TESTS += $(if $(shell command -v python3),$(addprefix tests/scripts/, \
               test_bench.py test_decide.py test_labels.py))
