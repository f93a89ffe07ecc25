"""The training engine: everything about training that no task changes."""
