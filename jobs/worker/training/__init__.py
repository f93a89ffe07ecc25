"""The training engine: the part of training that is common to all tasks."""
