"""The code copied to the nodes, where it is imported as ``worker``. It imports only itself."""
