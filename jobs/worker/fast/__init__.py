"""What makes training fast on CPUs: it knows no task and no options, and works with any model."""
