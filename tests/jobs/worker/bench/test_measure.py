"""The arithmetic of the measurements; test_run.py runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.worker.bench.measure import (
    FEWEST,
    WARM_UPS,
    Timing,
    Triad,
    bus_gb_per_second,
    choose_array_bytes,
    read_available_bytes,
    read_cache_bytes,
    repeat,
    tflops,
)


class Watch:
    """A clock that only work advances, by the listed times."""

    def __init__(self, *taken: float) -> None:
        self.now, self.taken, self.done = 0.0, list(taken), 0

    def __call__(self) -> float:
        return self.now

    def work(self) -> None:
        self.now += self.taken[min(self.done, len(self.taken) - 1)]
        self.done += 1


def test_the_median_without_the_warm_up() -> None:
    watch = Watch(9, 9, 1, 1, 5, 1, 2)

    assert repeat(watch.work, 0, watch) == Timing(1, FEWEST)
    assert watch.done == WARM_UPS + FEWEST


def test_short_work_is_repeated_until_the_time_is_over() -> None:
    watch = Watch(0.5)

    assert repeat(watch.work, 10, watch) == Timing(0.5, 20)


def test_tflops_count_a_product_and_a_sum() -> None:
    assert tflops(1000, 1.0) == pytest.approx(0.002)
    assert tflops(8192, 0.01) == pytest.approx(109.95, abs=0.01)


def test_the_triad_counts_three_arrays() -> None:
    assert Triad(Timing(0.5, 5), 10**9).gb_per_second == pytest.approx(6)


MIB = 1 << 20


@pytest.mark.parametrize(
    ("cache", "available", "ranks", "expected"),
    [
        (105 * MIB, 512 << 30, 1, 420 * MIB),  # four times the cache
        (480 * MIB, 384 << 30, 2, 1920 * MIB),
        (480 * MIB, 8 << 30, 1, 512 * MIB),  # but not all of the memory
        (0, 512 << 30, 1, 64 * MIB),  # where the kernel does not tell
        (32 * MIB, 100 * MIB, 4, 64 * MIB),
    ],
)
def test_arrays_are_well_above_the_caches(
    cache: int, available: int, ranks: int, expected: int
) -> None:
    assert choose_array_bytes(cache, available, ranks) == expected


def write_cache(root: Path, cpu: int, level: int, shared: str, size: str) -> None:
    folder = root / f"cpu{cpu}" / "cache" / f"index{level}"
    folder.mkdir(parents=True)
    (folder / "shared_cpu_list").write_text(f"{shared}\n")
    (folder / "size").write_text(f"{size}\n")


def test_a_cache_that_cpus_share_counts_once(tmp_path: Path) -> None:
    for cpu, shared in ((0, "0-1"), (1, "0-1"), (2, "2-3")):
        write_cache(tmp_path, cpu, 0, str(cpu), "32K")
        write_cache(tmp_path, cpu, 3, shared, "2048K")

    assert read_cache_bytes({0, 1}, tmp_path) == 2 * MIB
    assert read_cache_bytes({0, 1, 2}, tmp_path) == 4 * MIB
    assert read_cache_bytes({7}, tmp_path) == 0


def test_available_memory(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  100 kB\nMemFree:  1 kB\nMemAvailable:   64 kB\n")
    assert read_available_bytes(meminfo) == 64 << 10


@pytest.mark.parametrize(("ranks", "share"), [(2, 1.0), (4, 1.5), (1, 0.0)])
def test_bus_bandwidth(ranks: int, share: float) -> None:
    assert bus_gb_per_second(10**9, 0.5, ranks) == pytest.approx(2 * share)
