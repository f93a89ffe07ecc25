"""What every rank needs, whatever it computes: ranks, pinning, events, errors, stopping."""
