"""What every rank needs, whatever it computes: placement, ranks, phases, events, results."""
