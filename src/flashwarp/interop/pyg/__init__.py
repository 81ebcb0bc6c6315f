"""Features and graphs in files, for PyG; `flashwarp.pyg` is the door."""
