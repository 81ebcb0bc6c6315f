"""Files: what kernels hold of one that is open, and files by the blocks of their device."""
