"""Data for tasks: readers, tokens, and their cache."""
