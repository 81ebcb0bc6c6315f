"""Files: what kernels hold of one that is open."""
