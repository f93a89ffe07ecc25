"""The IAM policy that this tool needs, and checks for missing permissions."""
