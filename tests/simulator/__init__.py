"""The simulator of tests: the device headers and the controller under a seeded scheduler.

Its C++ lies beside it. Run `make simulate` or `python tests/simulator --help`; see
docs/testing.md.
"""
