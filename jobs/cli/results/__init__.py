"""Commands on the results of ended jobs."""
