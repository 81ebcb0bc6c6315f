"""Kernels of the caller's own: compiled, checked, launched."""
