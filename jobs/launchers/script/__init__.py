"""The same training job as a batch script for a Slurm cluster that is not yours, such as an HPC center's."""
