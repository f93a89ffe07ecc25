"""Machines as one cluster: nodes, SSH mesh, lifecycle, verification, event log, command line."""
