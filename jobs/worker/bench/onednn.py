"""The instruction sets that oneDNN reports to have used.

CPU flags don't prove that anything uses AMX. oneDNN's line about an executed bf16 product does: it names the
implementation:
https://uxlfoundation.github.io/oneDNN/dev_guide_verbose.html
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_TIMEOUT_S = 120
# A bf16 product, as in training. Without bf16 in hardware, torch leaves it to another library, so an fp32
# product through oneDNN follows, for which oneDNN reports at least what it could use.
_PROBE = """
import torch
x = torch.randn(256, 256)
torch.mm(x.bfloat16(), x.bfloat16())
torch.nn.functional.linear(x.to_mkldnn(), x.to_mkldnn(), torch.zeros(256).to_mkldnn())
"""
_EXECUTED = re.compile(
    r"onednn_verbose,(?:v\d+,)?(?:primitive,)?exec,cpu,"
    r"(?:matmul|inner_product|gemm_api),(?P<implementation>[^,]*),(?P<rest>.*)"
)


@dataclass(frozen=True)
class OneDnn:
    """oneDNN's report: the CPU's best instruction set, and the implementations that bf16 products ran.

    An example of these is ``brg_matmul:avx10_1_512_amx``.
    """

    isa: str = ""
    bf16: tuple[str, ...] = ()

    @property
    def amx(self) -> bool:
        """Whether a bf16 product ran on AMX; support by the CPU is not enough."""
        return any("amx" in name for name in self.bf16)

    @property
    def verdict(self) -> str:
        """One line for the user: whether AMX ran, and what ran instead."""
        if self.amx:
            return f"AMX ran ({next(name for name in self.bf16 if 'amx' in name)})"
        if self.bf16:
            return f"no AMX (bf16 ran as {', '.join(self.bf16)})"
        if not self.isa:
            return "no AMX (oneDNN reported nothing)"
        return f"no AMX ({self.isa}; oneDNN ran nothing in bf16)"


def parse_verbose(lines: Iterable[str]) -> OneDnn:
    """Parse oneDNN's verbose lines, of any version since 2.

    After one to three words that depend on the version (``onednn_verbose,v1,primitive,exec,cpu,…``), the
    fields have the same order. ``create`` lines name what was only considered.
    """
    isa, bf16 = "", dict[str, None]()
    for line in lines:
        if ",info,cpu,isa:" in line:
            isa = line.partition(",info,cpu,isa:")[2].strip()
        if (match := _EXECUTED.match(line)) and "bf16" in match["rest"]:
            bf16[match["implementation"]] = None
    return OneDnn(isa, tuple(bf16))


def ask_onednn(environ: Mapping[str, str] = os.environ) -> OneDnn:
    """Run a small product in a separate process and return oneDNN's report.

    In this process, oneDNN has read its variable already, and verbose output would slow the measurements.
    """
    asked = {name: value for name, value in environ.items() if not name.startswith("PMI_")}
    done = subprocess.run(
        [sys.executable, "-c", _PROBE],
        env={**asked, "ONEDNN_VERBOSE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    return parse_verbose(done.stdout.splitlines())
