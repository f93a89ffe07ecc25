"""From a specification to a running cluster, and back to nothing: reconcile, apply, down."""
