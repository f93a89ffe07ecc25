"""Training and programs: requests from the command line, turned into job plans."""
