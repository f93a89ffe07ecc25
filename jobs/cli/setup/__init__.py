"""Commands that set up this tool, or describe it."""
