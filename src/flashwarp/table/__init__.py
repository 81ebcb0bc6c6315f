"""Tables whose rows are weights of a model: how they are updated, made and kept."""
