"""Work on a cluster: what to run, on which cores, how mpirun starts it, and what came of it."""
