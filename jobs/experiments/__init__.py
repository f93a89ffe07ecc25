"""Measurements that run jobs: bench, and studies of the speed."""
