"""This machine as a cluster with a queue."""

from tests.jobs.launch.conftest import head

__all__ = ["head"]
