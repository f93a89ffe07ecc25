"""``run``: run any program on the nodes."""
