"""What every rank needs for any computation: placement, ranks, phases, events, results."""
