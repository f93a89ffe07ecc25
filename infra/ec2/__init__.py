"""EC2 resources: description, creation, and tags."""
