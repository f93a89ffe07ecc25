"""Run any program as the ranks of a job. Runs on Python 3.8, the oldest of all stacks."""
