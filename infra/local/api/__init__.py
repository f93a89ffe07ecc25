"""AWS APIs served by moto, made as strict as AWS."""
