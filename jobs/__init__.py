"""Jobs on a cluster: their plans, placement, places, and results."""
