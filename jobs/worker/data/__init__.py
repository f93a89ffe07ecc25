"""Data of tasks: readers, tokens, and the token cache."""
