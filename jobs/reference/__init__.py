"""The published recipe: the job in transformers' documentation, with corrections."""
