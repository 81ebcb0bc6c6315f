"""Checkpoints of torch.distributed.checkpoint; `flashwarp.dcp` is the door."""
