"""Checkpoints: versions of GPU state that cascade through GPU memory, host memory and storage."""
