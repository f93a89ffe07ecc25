"""Commands on the results of a job that has ended."""
