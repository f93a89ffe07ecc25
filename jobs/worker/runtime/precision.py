"""The arithmetic that suits a CPU: bf16 if the hardware has it, fp32 otherwise."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch

CPUINFO = Path("/proc/cpuinfo")
BF16_FLAGS = ("amx_bf16", "avx512_bf16")
"""The kernel's names for bf16 matrix instructions, fastest first."""
AMX_FLAGS = frozenset(("amx_bf16", "amx_tile", "amx_int8"))
ISA_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""Variables that keep oneDNN from newer instructions, in the order in which it reads them.
https://uxlfoundation.github.io/oneDNN/dev_guide_cpu_dispatcher_control.html"""
_WITHOUT_BF16 = (
    "SSE41",
    "AVX",
    "AVX2",
    "AVX2_VNNI",
    "AVX2_VNNI_2",
    "AVX512_CORE",
    "AVX512_CORE_VNNI",
)
_WITHOUT_AMX = ("AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX10_1_512", "AVX10_2_512")


class Precision(NamedTuple):
    """``bf16`` (autocast) or ``fp32``, and why."""

    dtype: str
    reason: str


def read_cpu_flags(path: Path = CPUINFO, environ: Mapping[str, str] = os.environ) -> frozenset[str]:
    """Return the first processor's flags, as the kernel names them, that oneDNN may use."""
    lines = (line.partition(":") for line in path.read_text().splitlines())
    flags = next((value.split() for name, _, value in lines if name.strip() == "flags"), [])
    limit = next((environ[name].upper() for name in ISA_LIMITS if environ.get(name)), "")
    hidden = AMX_FLAGS if limit in (*_WITHOUT_BF16, *_WITHOUT_AMX) else frozenset()
    return frozenset(flags) - hidden - ({"avx512_bf16"} if limit in _WITHOUT_BF16 else set())


def choose_precision(asked: str, flags_by_host: Mapping[str, frozenset[str]]) -> Precision:
    """Return what ``--dtype`` means on these machines: ``auto`` needs bf16 in the hardware of each."""
    if asked != "auto":
        return Precision(asked, f"set by --dtype {asked}")
    without = [host for host, flags in flags_by_host.items() if not flags.intersection(BF16_FLAGS)]
    if without:
        return Precision("fp32", f"no {' or '.join(BF16_FLAGS)} on {', '.join(without)}")
    common = frozenset.intersection(*flags_by_host.values())
    shared = [flag for flag in BF16_FLAGS if flag in common]
    return Precision("bf16", f"every CPU has {' or '.join(shared or BF16_FLAGS)}")


def autocast(dtype: str) -> AbstractContextManager[Any]:
    """Compute in bf16 inside a ``with`` block, if that is the precision."""
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bf16")
