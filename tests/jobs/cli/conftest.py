"""The command line in this process, as the tests of cluster commands have it."""

from tests.cluster.conftest import line, prepared_clusters, simulated_cloud

__all__ = ["line", "prepared_clusters", "simulated_cloud"]
