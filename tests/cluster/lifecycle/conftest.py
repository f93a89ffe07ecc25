from __future__ import annotations

import pytest

from tests.harness.simulated_cloud import SimulatedCloud


@pytest.fixture
def cloud(cloud: SimulatedCloud) -> SimulatedCloud:
    """A cloud as AWS is on an ordinary day: throttled, eventually consistent, slow."""
    cloud.be("unkind")
    return cloud
