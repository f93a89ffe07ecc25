"""Machines as one cluster: nodes, their mesh of SSH and names, verification, lifecycle, command line."""
