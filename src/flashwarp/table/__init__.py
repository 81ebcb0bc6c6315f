"""Tables larger than memory: lookups of rows by id, and training of the rows, by kernels."""
