"""Planners: desired and existing resources in, actions out."""
