"""Jobs on a cluster: their plans, placement, launchers, and results."""
