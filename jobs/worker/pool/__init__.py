"""Ranks that take work from rank 0 one piece after another, each in a process on the rank's cores."""
