"""The same training job on Kubernetes, or as a script for another Slurm cluster."""
