"""Studies made of several jobs: bench, tune, scaling."""
