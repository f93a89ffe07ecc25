"""A cluster of machines: nodes, SSH mesh, lifecycle, verification, event log, commands."""
