"""The ways to run a job. Each launcher gets a plan, which knows no launcher, and has a folder of its own."""
