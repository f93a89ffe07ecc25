"""Lifecycle of a cluster: reconcile, apply, down."""
