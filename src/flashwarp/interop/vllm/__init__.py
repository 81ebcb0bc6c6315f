"""Tables of models that vLLM runs, read from their checkpoints; `plugin` is the door."""
