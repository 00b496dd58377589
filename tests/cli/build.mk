# tests/cli: the qshim command as a person meets it.

CPU_TESTS += tests/cli/test_cli tests/cli/test_inspect
