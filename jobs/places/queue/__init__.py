"""Jobs in the Slurm queue that this tool installs on its clusters."""
