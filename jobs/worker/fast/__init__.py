"""Faster training on CPUs, for any model; independent of tasks and options."""
