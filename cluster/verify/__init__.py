"""Node and network checks: probes that run on the nodes, and verdicts on their answers."""
