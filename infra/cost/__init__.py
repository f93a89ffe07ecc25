"""Prices and quotas."""
