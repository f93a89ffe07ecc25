from __future__ import annotations

import pytest

from tests.harness.simulated_cloud import SimulatedCloud

# The whole way up, down, and between, and what buys or removes twice if it looks too early. It takes three
# times as many calls there.
_UNKIND = (
    *("test_changes.py", "test_down.py", "test_up.py", "test_up_with_faults.py"),
    *("test_bad_machines.py", "test_removed_meanwhile.py", "test_two_users.py"),
)


@pytest.fixture
def cloud(cloud: SimulatedCloud, request: pytest.FixtureRequest) -> SimulatedCloud:
    """In some files, a cloud as AWS is on an ordinary day: throttled, eventually consistent, slow."""
    if request.path.name in _UNKIND:
        cloud.be("unkind")
    return cloud
