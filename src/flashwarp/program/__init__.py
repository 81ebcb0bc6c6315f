"""The caller's own kernels: compiled, checked, launched."""
