"""`serve`: a trained model over HTTP, for trying it and for use inside a network."""
