"""S3 on the nodes: data in; checkpoints and results out."""
