"""The bill that the simulated EC2 keeps of its machines."""

from __future__ import annotations

import pytest

from tests.cloud.meter import Use

_DISK = 100 * 0.08 / 720


def test_a_machine_is_billed_while_it_runs_and_its_disk_and_address_while_they_exist() -> None:
    use = Use(6.0, _DISK, 1000.0, has_address=True)
    assert use.bill(1000.0 + 360) == pytest.approx((_DISK + 0.005) / 10)
    use.start(2000.0)
    use.stop(2000.0 + 3600)
    use.stop(9999.0)
    use.ended = use.deleted = 1000.0 + 7200
    assert use.bill(1e9) == pytest.approx(6 + 2 * (_DISK + 0.005))
    # Each start is billed for a minute at least.
    use.start(9999.0)
    use.stop(10000.0)
    assert use.bill(1e9) == pytest.approx(6 + 2 * (_DISK + 0.005) + 6 / 60)
