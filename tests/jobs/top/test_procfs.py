"""/proc as text: CPU time by CPU, memory, traffic."""

from __future__ import annotations

import pytest

from jobs.top.procfs import busy_percent, parse_cpus, parse_memory, parse_network, parse_times

STAT = """\
cpu  500 0 100 1000 40 0 0 0 0 0
cpu0 400 0 100 100 20 10 5 5 300 0
cpu11 100 0 0 900 20 0 0 0 0 0
intr 12345 0 0
ctxt 99
"""
NET = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs
    lo: 9000     10    0    0    0     0          0         0     9000      10    0
  ens5:1000      10    0    0    0     0          0         0      200      10    0
docker0: 70      10    0    0    0     0          0         0       30      10    0
"""


def test_ticks_are_read_by_cpu_and_guests_count_once() -> None:
    assert parse_times(STAT) == {0: (520, 640), 11: (100, 1020)}


def test_busy_is_the_share_of_the_time_of_the_chosen_cpus() -> None:
    before = {0: (100, 200), 1: (0, 0), 2: (5, 5)}
    after = {0: (150, 300), 1: (0, 100), 2: (105, 105)}

    assert busy_percent(before, after, [0]) == 50
    assert busy_percent(before, after, [0, 1]) == 25
    assert busy_percent(before, after, [0, 1, 2]) == 50


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {0: (1, 2)}),  # a CPU that came online
        ({0: (1, 2)}, {}),
        ({0: (1, 2)}, {0: (1, 2)}),
        ({0: (9, 10)}, {0: (8, 11)}),  # iowait may decrease
    ],
)
def test_cpus_without_two_readings_are_not_busy(
    before: dict[int, tuple[int, int]], after: dict[int, tuple[int, int]]
) -> None:
    assert busy_percent(before, after, [0]) == 0


def test_a_list_of_cpus_is_read_as_the_kernel_writes_it() -> None:
    assert parse_cpus("0-3,8\n") == {0, 1, 2, 3, 8}
    assert parse_cpus("") == set()


def test_memory_is_in_bytes() -> None:
    text = "MemTotal:       1000 kB\nMemFree:  5 kB\nMemAvailable:    400 kB\n"
    assert parse_memory(text) == {"memory": 1024000, "available": 409600}
    assert parse_memory("") == {"memory": 0, "available": 0}


def test_traffic_is_that_of_real_devices_or_of_all_but_loopback() -> None:
    assert parse_network(NET, {"ens5"}) == (1000, 200)
    assert parse_network(NET, set()) == (1070, 230)
    assert parse_network("", set()) == (0, 0)
