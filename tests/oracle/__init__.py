"""A differential fuzzer: random programs over every public call, beside a model of a few lines."""
