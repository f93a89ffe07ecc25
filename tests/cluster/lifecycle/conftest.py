from __future__ import annotations

import pytest

from tests.harness.simulated_cloud import SimulatedCloud


@pytest.fixture
def simulated_cloud(simulated_cloud: SimulatedCloud) -> SimulatedCloud:
    """A cloud as AWS is on an ordinary day: throttled, eventually consistent, slow."""
    simulated_cloud.be("unkind")
    return simulated_cloud
