"""Checks of nodes and network: probes that run on the nodes, and verdicts on their answers."""
