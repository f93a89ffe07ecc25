"""A cluster's lifecycle: reconcile, apply, down."""
