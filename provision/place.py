"""Where the package indexes are asked from: this machine, or one in the cloud."""

from __future__ import annotations

import shlex
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Protocol

from provision.host import Host
from provision.index_probe import probe

# Beyond a command's own limit: for the connection.
_GRACE_S = 30
# https://www.gnu.org/software/coreutils/manual/html_node/timeout-invocation.html
_TIMED_OUT = (124, 137)


class Place(Protocol):
    """A machine that pip runs on."""

    def run(self, argv: Sequence[str], limit_s: float) -> tuple[int | None, str]:
        """The exit code, ``None`` where the time was over, and all output."""

    def read(self, path: str) -> str:
        """A file's text."""

    def folder(self) -> AbstractContextManager[str]:
        """A folder for files of one run."""

    def probe(self, url: str, *, strict: bool, limit_s: float) -> str:
        """See :func:`provision.index_probe.probe`."""


@dataclass(frozen=True)
class Here:
    """This machine."""

    def run(self, argv: Sequence[str], limit_s: float) -> tuple[int | None, str]:
        try:
            done = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            output = late.stdout or b""
            return None, output.decode(errors="replace") if isinstance(output, bytes) else output
        return done.returncode, done.stdout

    def read(self, path: str) -> str:
        return Path(path).read_text()

    def folder(self) -> AbstractContextManager[str]:
        return tempfile.TemporaryDirectory(prefix="spr-cluster-")

    def probe(self, url: str, *, strict: bool, limit_s: float) -> str:
        return probe(url, strict=strict, limit_s=limit_s)


@dataclass(frozen=True)
class OnHost:
    """A machine over SSH, which is given back afterwards: nothing on it is tidied up."""

    host: Host
    work: str = "/tmp/spr-cluster-check"
    # One connection is not for several threads at a time.
    _turn: threading.Lock = field(default_factory=threading.Lock, compare=False)

    def run(self, argv: Sequence[str], limit_s: float) -> tuple[int | None, str]:
        command = f"timeout -k 5 {max(limit_s, 1):.0f} {shlex.join(argv)} </dev/null 2>&1"
        with self._turn:
            done = self.host.run(command, timeout_s=limit_s + _GRACE_S, check=False)
        return None if done.exit_code in _TIMED_OUT else done.exit_code, done.stdout

    def read(self, path: str) -> str:
        with self._turn:
            return self.host.run(f"cat {shlex.quote(path)}").stdout

    def folder(self) -> AbstractContextManager[str]:
        return nullcontext(self.work)

    def probe(self, url: str, *, strict: bool, limit_s: float) -> str:
        script = resources.files("provision").joinpath("index_probe.py").read_text()
        kind = "strict" if strict else "lenient"
        argv = ["python3", "-c", script, url, kind, f"{limit_s:g}"]
        code, output = self.run(argv, limit_s + 5)
        if code is None:
            return f"did not answer within {limit_s:g} s"
        return output.strip() if code == 0 else f"can't be asked about: {output.strip()[-200:]}"
