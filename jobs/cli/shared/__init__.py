"""Shared by several commands: choosing a job, its options, its display, and what follows its end."""
