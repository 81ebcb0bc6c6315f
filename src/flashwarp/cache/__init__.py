"""The cache of lines in device memory, and the host tier below it."""
