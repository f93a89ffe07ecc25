"""What several commands share: the job they mean, its options, its display, and its end."""
