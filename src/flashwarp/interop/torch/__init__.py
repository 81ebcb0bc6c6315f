"""Arrays as arguments of torch's operators; `flashwarp.torch` is the door."""
