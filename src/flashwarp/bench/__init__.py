"""Benchmarks that run from the installed package; each prints its ceiling and its alternatives."""
