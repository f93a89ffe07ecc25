"""The runtime of every rank: placement, ranks, phases, events, results."""
