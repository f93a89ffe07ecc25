"""The published recipe: the job of transformers' documentation, with corrections."""
