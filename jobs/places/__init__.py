"""Launchers: the ways to run a job. Each has its own folder and takes a plan that knows no launcher."""
