"""This machine as a cluster with a queue."""

from tests.jobs.launchers.conftest import head

__all__ = ["head"]
