"""The parts of `flashwarp.torch.offload`."""
