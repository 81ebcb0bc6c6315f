"""From device source to running kernels: driver, compiler, and the cache of compiled code."""
