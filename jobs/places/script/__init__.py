"""The same training job as a batch script for another Slurm cluster, such as an HPC center's."""
