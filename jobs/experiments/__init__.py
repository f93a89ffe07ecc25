"""Studies of several jobs: bench, tune, scaling."""
