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


def test_each_start_is_billed_for_a_minute_at_least() -> None:
    use = Use(6.0, 0.0, 1000.0, ended=1000.0)
    for begin in (1000.0, 2000.0):
        use.start(begin)
        use.stop(begin + 1)
    assert use.bill(9999.0) == pytest.approx(2 * 6 / 60)
