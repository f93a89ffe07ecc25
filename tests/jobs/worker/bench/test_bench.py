"""Measurements: their arithmetic, what oneDNN's verbose lines prove, and two ranks as on the nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobs.worker.bench import onednn
from jobs.worker.bench.measure import (
    FEWEST,
    WARM_UPS,
    Timing,
    bus_gb_per_second,
    choose_array_bytes,
    read_available_bytes,
    read_cache_bytes,
    repeat,
    tflops,
    triad_gb_per_second,
)
from jobs.worker.bench.onednn import OneDnn, ask_onednn, parse_verbose
from tests.jobs.worker.training.test_run import run_ranks


class Watch:
    """A clock that only work advances, by the listed times."""

    def __init__(self, *taken: float) -> None:
        self.now, self.taken, self.done = 0.0, list(taken), 0

    def __call__(self) -> float:
        return self.now

    def work(self) -> None:
        self.now += self.taken[min(self.done, len(self.taken) - 1)]
        self.done += 1


def test_the_median_without_the_warm_up_of_work_that_is_repeated_until_the_time_is_over() -> None:
    watch = Watch(9, 9, 1, 1, 5, 1, 2)
    assert repeat(watch.work, 0, watch) == Timing(1, FEWEST)
    assert watch.done == WARM_UPS + FEWEST
    watch = Watch(0.5)
    assert repeat(watch.work, 10, watch) == Timing(0.5, 20)


def test_a_product_counts_with_its_sum_and_the_triad_with_three_arrays() -> None:
    assert tflops(8192, 0.01) == pytest.approx(109.95, abs=0.01)
    assert triad_gb_per_second(10**9, 0.5) == pytest.approx(6)


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


_ISA = (
    "Intel AVX-512 with float16, Intel DL Boost and bfloat16 support and Intel AMX with bfloat16 "
    "and 8-bit integer support"
)
_HEAD = (
    "onednn_verbose,v1,info,oneDNN v3.12.0 (commit 80afa71049cd69a3df32adcccb623b12cd7baa22)",
    "onednn_verbose,v1,info,cpu,runtime:OpenMP,nthr:32",
    f"onednn_verbose,v1,info,cpu,isa:{_ISA}",
    "onednn_verbose,v1,primitive,info,template:operation,engine,primitive,implementation,prop_kind,"
    "memory_descriptors,attributes,auxiliary,problem_desc,exec_time",
)
_AMX = (
    "onednn_verbose,v1,primitive,exec,cpu,matmul,brg_matmul:avx10_1_512_amx,undef,"
    "src:bf16::blocked:ab::f0 wei:bf16::blocked:ab::f0 dst:bf16::blocked:ab::f0,attr-scratchpad:user,,"
    "256x256:256x256,0.0688477"
)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (_AMX, "brg_matmul:avx10_1_512_amx"),
        (
            "onednn_verbose,primitive,exec,cpu,matmul,brg:avx512_core_amx,undef,src_bf16::blocked:"
            "ab::f0 wei_bf16::blocked:ba::f0 dst_bf16::blocked:ab::f0,attr-scratchpad:user ,,256x11008",
            "brg:avx512_core_amx",
        ),
        (
            "onednn_verbose,exec,cpu,matmul,brg:avx512_core_amx_bf16,undef,src_bf16::blocked:ab:f0 "
            "wei_bf16::blocked:ab:f0 dst_bf16::blocked:ab:f0,attr-scratchpad:user ,,256x256:256x256,1",
            "brg:avx512_core_amx_bf16",
        ),
    ],
    ids=["3.12", "3.3", "2.7"],
)
def test_amx_ran(line: str, name: str) -> None:
    said = parse_verbose([*_HEAD, line])

    assert said == OneDnn(_ISA, (name,))
    assert said.amx
    assert said.verdict == f"AMX ran ({name})"


_NONE = f"no AMX ({_ISA}; oneDNN ran nothing in bf16)"


@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        ("", _NONE),
        (
            _AMX.replace("avx10_1_512_amx", "avx512_core_bf16"),
            "no AMX (bf16 ran as brg_matmul:avx512_core_bf16)",
        ),
        # It was considered, and not taken.
        (_AMX.replace("exec,cpu", "create:dispatch,matmul,cpu").replace("amx", "amx_fp16"), _NONE),
        (_AMX.replace("exec,", "create:cache_miss,"), _NONE),
        # In eight-bit integers, and copying: neither is a product in bf16.
        (_AMX.replace("bf16", "s8"), _NONE),
        (_AMX.replace(",matmul,brg_matmul:", ",reorder,jit:"), _NONE),
        (f"# {_AMX}", _NONE),
    ],
    ids=["flags alone", "avx512", "dispatch", "create", "int8", "reorder", "quoted"],
)
def test_cpu_flags_alone_are_not_amx(line: str, verdict: str) -> None:
    said = parse_verbose([*_HEAD, line])

    assert not said.amx
    assert said.verdict == verdict


def test_the_probe_runs_without_mpiruns_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    probe = f"import os; print({_AMX!r} if os.environ['ONEDNN_VERBOSE'] == '1' else '', os.environ)"
    monkeypatch.setattr(onednn, "_PROBE", f"{probe}; assert 'PMI_FD' not in os.environ")

    assert ask_onednn({"PMI_FD": "7", "PATH": "/bin"}).amx
    assert parse_verbose([]).verdict == "no AMX (oneDNN reported nothing)"


@pytest.mark.usefixtures("node_environ")
def test_two_ranks_measure_at_the_same_time(node: Path) -> None:
    # Without a known cache, arrays are small.
    code = node / "code/worker/bench/measure.py"
    caches = '"/sys/devices/system/cpu"'
    assert caches in code.read_text()
    code.write_text(code.read_text().replace(caches, '"/none"'))
    first, second = run_ranks(node, [["-m", "worker.bench", '{"seconds": 0.1}']] * 2)

    assert (first.code, second.code) == (0, 0), first.output + second.output
    assert not second.events, "only rank 0 speaks"
    names = [event["name"] for event in first.of("phase")]
    # No all-reduce: both ranks are on one machine, where no network is between them.
    assert names == ["which instructions oneDNN uses", "matrix products", "memory"]
    check_result(first.events[-1])


def check_result(result: dict[str, Any]) -> None:
    assert (result["event"], result["backend"]) == ("result", "gloo")
    assert result["all_reduce"] == []
    assert [rank["rank"] for rank in result["ranks"]] == [0, 1]
    with_amx = "amx_bf16" in Path("/proc/cpuinfo").read_text()
    for rank in result["ranks"]:
        assert rank["threads"] == 1
        assert 0 < rank["gemm_tflops"] < 1000
        assert 0.1 < rank["memory_gb_s"] < 2000
        assert rank["memory_array_bytes"] >= 64 << 20
        # Where the processor has no AMX, nothing else may be said.
        assert rank["amx"] is False or with_amx
        assert rank["onednn"].startswith("AMX ran (" if rank["amx"] else "no AMX (")
