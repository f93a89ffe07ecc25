"""Any program as the ranks of a job, on every stack's Python, the oldest of which is 3.8."""
