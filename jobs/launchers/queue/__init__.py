"""Jobs through the queue of a cluster of this tool: its own Slurm."""
