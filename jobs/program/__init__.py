"""``run``: any program on the nodes."""
