"""Conclusions from measurements: share of peak, and slow nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from infra.instance_types import INSTANCE_TYPES
from jobs.experiments.bench import NodeSpeed, SlowNode, find_peak, find_slow


def node(name: str = "node0", gemm: float = 100.0, memory: float = 200.0) -> NodeSpeed:
    return NodeSpeed(
        name=name,
        instance=f"i-{name}",
        type="r7iz.metal-16xl",
        hostname=f"host-of-{name}",
        threads=32,
        gemm_tflops=gemm,
        peak_tflops=127.8,
        memory_gb_s=memory,
        amx=True,
        onednn="AMX ran (brg_matmul:avx10_1_512_amx)",
    )


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("r7iz.metal-16xl", 127.8),  # 32 cores x 1024 x 3.9 GHz
        ("c7i.metal-24xl", 157.3),  # 48 x 1024 x 3.2
        ("m8i.metal-96xl", 766.8),
        ("m7i.16xlarge", None),  # a part of a processor
        ("c6i.16xlarge", None),  # no AMX
    ],
)
def test_the_peak_of_a_whole_machine(name: str, peak: float | None) -> None:
    found = INSTANCE_TYPES[name].peak_bf16_tflops
    assert found is None if peak is None else found == pytest.approx(peak, abs=0.05)


def test_every_whole_machine_with_amx_has_a_peak() -> None:
    metal = [entry for entry in INSTANCE_TYPES.values() if ".metal-" in entry.name and entry.amx]
    assert len(metal) >= 14
    assert all(entry.peak_bf16_tflops for entry in metal)


def test_only_bf16_on_whole_machines_has_a_peak() -> None:
    assert find_peak("r7iz.metal-16xl", dtype="bf16", real=True) == pytest.approx(127.8, abs=0.05)
    assert find_peak("r7iz.metal-16xl", dtype="fp32", real=True) is None
    assert find_peak("r7iz.metal-16xl", dtype="bf16", real=False) is None
    assert find_peak("x99.metal", dtype="bf16", real=True) is None
    assert node(gemm=63.9).peak_share == pytest.approx(0.5)
    assert replace(node(), peak_tflops=None).peak_share is None


@pytest.mark.parametrize(
    ("gemm", "slow"),
    [
        ((100, 100, 100, 70), [("node3", 0.70)]),
        ((100, 91, 100, 100), []),
        ((100, 89, 100, 100), [("node1", 0.89)]),
        # Half of the nodes slow: the median is between, and the slow half is still named.
        ((100, 100, 60, 60), [("node2", 0.75), ("node3", 0.75)]),
        # Of two, the faster one is the measure.
        ((100, 89), [("node1", 0.89)]),
        ((100,), []),
        ((100, 100, 100, 300), []),
    ],
)
def test_a_node_below_nine_tenths_of_the_median_is_slow(
    gemm: tuple[float, ...], slow: list[tuple[str, float]]
) -> None:
    nodes = [node(f"node{rank}", gemm=value) for rank, value in enumerate(gemm)]

    found = find_slow(nodes)

    assert [entry.node for entry in found] == [name for name, _ in slow]
    assert [entry.share for entry in found] == [pytest.approx(share) for _, share in slow]
    assert {entry.what for entry in found} <= {"matrix products"}


def test_slow_memory_is_named_as_such() -> None:
    nodes = [node("node0"), node("node1"), node("node2", memory=100)]
    assert find_slow(nodes) == (SlowNode("node2", "memory", 0.5),)
