"""Commands on clusters: up, verify, status, down, and what surrounds them."""
