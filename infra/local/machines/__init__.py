"""Containers as machines."""
