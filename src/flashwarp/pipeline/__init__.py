"""Batches of rows that move beside the work of a device."""
