"""Tests that run in a guest, each module on the machine that it names `MACHINE`."""
