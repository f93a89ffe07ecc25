"""The live view of a cluster: samplers on the nodes, snapshots, and their display."""
