"""What machines cost, and how many the account may run."""
