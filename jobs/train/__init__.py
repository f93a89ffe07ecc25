"""Training and prediction: turn requests from the command line into job plans."""
