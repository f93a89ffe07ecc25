"""Which arithmetic suits a CPU: bf16 where the hardware has it, fp32 elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

CPUINFO = Path("/proc/cpuinfo")
BF16_FLAGS = ("amx_bf16", "avx512_bf16")
"""The kernel's names for bf16 matrix instructions, fastest first."""

AMX_FLAGS = frozenset(("amx_bf16", "amx_tile", "amx_int8"))


class Precision(NamedTuple):
    """``bf16`` (autocast) or ``fp32``, and why."""

    dtype: str
    reason: str


def read_cpu_flags(path: Path = CPUINFO) -> frozenset[str]:
    """The first processor's flags, as the kernel names them."""
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


def choose_precision(asked: str, flags_by_host: Mapping[str, frozenset[str]]) -> Precision:
    """What ``--dtype`` means on these machines: ``auto`` needs bf16 in the hardware of each."""
    if asked != "auto":
        return Precision(asked, f"asked for with --dtype {asked}")
    without = [host for host, flags in flags_by_host.items() if not flags.intersection(BF16_FLAGS)]
    if without:
        return Precision("fp32", f"no {' or '.join(BF16_FLAGS)} on {', '.join(without)}")
    common = frozenset.intersection(*flags_by_host.values())
    shared = [flag for flag in BF16_FLAGS if flag in common]
    return Precision("bf16", f"every CPU has {' or '.join(shared or BF16_FLAGS)}")
