"""Training and predictions: requests from the command line, turned into job plans."""
