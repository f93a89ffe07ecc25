"""This machine as a cluster with a queue."""

from tests.jobs.places.conftest import head

__all__ = ["head"]
