"""A cache between processes: names, messages, exported memory; owner's and client's end."""
