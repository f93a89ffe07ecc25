"""The only way to run a job: plan, placement, mpirun, files, follow, record."""
