"""Verdicts on the answers of the nodes. Pure: nothing here contacts a machine."""
