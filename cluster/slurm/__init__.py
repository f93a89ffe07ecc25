"""Slurm on the nodes: its configuration, and the queue of jobs that it keeps."""
