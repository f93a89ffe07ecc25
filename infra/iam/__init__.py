"""The IAM policy this tool needs, and checks of what the caller lacks."""
