"""AWS accounts: session, credentials, clients, and the errors of their calls."""
