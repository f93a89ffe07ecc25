"""Predictions for a corpus: one file, a folder, or a prefix in S3, in shards that the ranks take in turn."""
