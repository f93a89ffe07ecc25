"""The precision for a CPU: bf16 if the hardware supports it, fp32 otherwise."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .errors import WorkerError

CPUINFO = Path("/proc/cpuinfo")
BF16_FLAGS = ("amx_bf16", "avx512_bf16")
"""The kernel's names for bf16 matrix instructions, fastest first."""
INT8_FLAGS = ("amx_int8", "avx512_vnni")
"""Without these, oneDNN adds pairs of int8 products in 16 bits, so large ones are wrong."""
INTEL = "GenuineIntel"
AMX_FLAGS = frozenset(("amx_bf16", "amx_tile", "amx_int8"))
ISA_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""Variables that keep oneDNN from newer instructions, in the order of their precedence.
https://uxlfoundation.github.io/oneDNN/dev_guide_cpu_dispatcher_control.html"""
_WITHOUT_VNNI = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE")
_WITHOUT_BF16 = (*_WITHOUT_VNNI, "AVX512_CORE_VNNI")
_WITHOUT_AMX = ("AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX10_1_512", "AVX10_2_512")


class Precision(NamedTuple):
    """``bf16`` (autocast) or ``fp32``, and why; with ``int8``, compiled layers multiply in that."""

    dtype: str
    reason: str
    int8: bool = False

    @property
    def name(self) -> str:
        """The value of ``--dtype`` that it stands for."""
        return "int8" if self.int8 else self.dtype


def read_cpu_flags(path: Path = CPUINFO, environ: Mapping[str, str] = os.environ) -> frozenset[str]:
    """Return the first processor's vendor and the kernel's flags that oneDNN may use."""
    with path.open() as file:  # all of it is much on a machine with 192 processors
        lines = [line.partition(":") for line in takewhile(str.strip, file)]
    vendor, flags = (
        next((value.split() for name, _, value in lines if name.strip() == wanted), [])
        for wanted in ("vendor_id", "flags")
    )
    limit = next((environ[name].upper() for name in ISA_LIMITS if environ.get(name)), "")
    hidden = AMX_FLAGS if limit in (*_WITHOUT_BF16, *_WITHOUT_AMX) else frozenset()
    hidden |= {"avx512_bf16"} if limit in _WITHOUT_BF16 else set()
    hidden |= {"avx512_vnni"} if limit in _WITHOUT_VNNI else set()
    return frozenset((*vendor, *flags)) - hidden


def choose_precision(asked: str, flags_by_host: Mapping[str, frozenset[str]]) -> Precision:
    """Resolve ``--dtype`` for these machines: ``auto`` chooses bf16 only if it is fast on all.

    Raises :class:`WorkerError` for int8 if one of them can't compute it.
    """
    if asked == "int8":
        lacking = [host for host, flags in flags_by_host.items() if not flags & {*INT8_FLAGS}]
        if lacking:
            needed = " or ".join(INT8_FLAGS)
            raise WorkerError(
                f"--dtype int8 needs {needed}: missing on {', '.join(lacking)}",
                hint="use --dtype auto",
            )
        dtype, reason = choose_precision("auto", flags_by_host)[:2]
        why = f"set by --dtype int8; {dtype} for the rest: {reason}"
        return Precision(dtype, why, int8=True)
    if asked != "auto":
        return Precision(asked, f"set by --dtype {asked}")
    fast = {host: find_fast_bf16(flags) for host, flags in flags_by_host.items()}
    without = [host for host, flags in fast.items() if not flags]
    if any("avx512_bf16" in flags_by_host[host] for host in without):
        hosts = ", ".join(without)
        return Precision("fp32", f"without amx_bf16, Intel's fp32 is faster than bf16, on {hosts}")
    if without:
        return Precision("fp32", f"no {' or '.join(BF16_FLAGS)} on {', '.join(without)}")
    shared = [flag for flag in BF16_FLAGS if all(flag in flags for flags in fast.values())]
    return Precision("bf16", f"every CPU has {' or '.join(shared or BF16_FLAGS)}")


def choose_here() -> str:
    """Return ``bf16`` if it is fast on this machine, else ``fp32``."""
    return choose_precision("auto", {"this machine": read_cpu_flags()}).dtype


def find_fast_bf16(flags: frozenset[str]) -> frozenset[str]:
    """Return the flags of bf16 instructions that are faster than fp32.

    With Intel's avx512_bf16, a product takes 1.85 times as long as in fp32 (benchmarks/log.jsonl); with
    AMD's, training was twice as fast.
    """
    slow = {"avx512_bf16"} if INTEL in flags and "amx_bf16" not in flags else set()
    return flags.intersection(BF16_FLAGS) - slow


def autocast(dtype: str) -> AbstractContextManager[Any]:
    """Use bf16 inside a ``with`` block, if that is the precision."""
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bf16")
