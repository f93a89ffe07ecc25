from __future__ import annotations

from pathlib import Path

import pytest

from jobs.worker.runtime.errors import WorkerError
from jobs.worker.runtime.precision import (
    Precision,
    choose_precision,
    read_cpu_flags,
)

AMX = frozenset(("avx512_vnni", "avx512_bf16", "amx_bf16", "amx_tile", "amx_int8"))
ZEN4 = frozenset(("avx512_bf16", "avx512_vnni"))
INTEL_AVX512 = ZEN4 | {"GenuineIntel"}
OLD = frozenset(("avx2",))


SLOW = "without amx_bf16, Intel's fp32 is faster than bf16, on b"
REST = "set by --dtype int8; {} for the rest: {}"


@pytest.mark.parametrize(
    ("asked", "hosts", "expected"),
    [
        ("auto", {"a": AMX, "b": AMX}, ("bf16", "every CPU has amx_bf16 or avx512_bf16")),
        ("auto", {"a": AMX, "b": ZEN4}, ("bf16", "every CPU has avx512_bf16")),
        ("auto", {"a": AMX, "b": OLD}, ("fp32", "no amx_bf16 or avx512_bf16 on b")),
        ("auto", {"a": AMX | {"GenuineIntel"}}, ("bf16", "every CPU has amx_bf16 or avx512_bf16")),
        ("auto", {"a": AMX, "b": INTEL_AVX512}, ("fp32", SLOW)),
        ("bf16", {"a": INTEL_AVX512}, ("bf16", "set by --dtype bf16")),
        ("fp32", {"a": AMX}, ("fp32", "set by --dtype fp32")),
        ("int8", {"a": ZEN4}, ("bf16", REST.format("bf16", "every CPU has avx512_bf16"), True)),
    ],
)
def test_auto_is_bf16_only_if_it_is_faster_on_every_cpu(
    asked: str, hosts: dict[str, frozenset[str]], expected: tuple[str, str, bool]
) -> None:
    assert choose_precision(asked, hosts) == Precision(*expected)


def test_int8_is_refused_where_its_products_would_be_wrong() -> None:
    with pytest.raises(WorkerError, match="needs amx_int8 or avx512_vnni: missing on b, c"):
        choose_precision("int8", {"a": AMX, "b": OLD, "c": OLD})


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, AMX),
        ({"ONEDNN_MAX_CPU_ISA": "avx2"}, frozenset()),
        ({"DNNL_MAX_CPU_ISA": "AVX512_CORE"}, frozenset()),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, ZEN4),
        ({"ONEDNN_MAX_CPU_ISA": "ALL", "DNNL_MAX_CPU_ISA": "AVX2"}, AMX),
    ],
)
def test_instructions_that_onednn_must_not_use_do_not_count(
    tmp_path: Path, environ: dict[str, str], expected: frozenset[str]
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"flags\t: {' '.join(AMX)}\n")
    assert read_cpu_flags(cpuinfo, environ) == expected


def test_cpu_flags_are_those_of_the_first_processor(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(
        "processor\t: 0\nvendor_id\t: GenuineIntel\nvmx flags\t: x\nflags\t\t: fpu amx_bf16\n\n"
        "vendor_id\t: AuthenticAMD\nflags\t: other\n"
    )
    assert read_cpu_flags(cpuinfo, {}) == {"GenuineIntel", "fpu", "amx_bf16"}
    cpuinfo.write_text("processor\t: 0\nFeatures\t: asimd\n")
    assert read_cpu_flags(cpuinfo, {}) == frozenset()
