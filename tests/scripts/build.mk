# tests/scripts: the benchmarks and what the GPU suite concludes, without a GPU, and labels with a stand-in for
# PyTorch.

CPU_TESTS += $(if $(shell command -v python3),$(addprefix tests/scripts/,test_bench.py test_decide.py test_labels.py))
