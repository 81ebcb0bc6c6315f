"""Pipelines: batches of rows that arrive while the device computes (CAM)."""
