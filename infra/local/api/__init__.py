"""AWS APIs, served by moto and as strict as AWS."""
