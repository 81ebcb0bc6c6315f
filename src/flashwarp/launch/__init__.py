"""What prepares launches on arrays: checked operands, parameters, plans, and their order."""
