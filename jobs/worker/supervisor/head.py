"""The job's files on the head if another node runs the job: log, begin, end, and results."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..storage import ownership
from .commands import ask, run_ssh, succeeds
from .watch import announce, say

_TRIES_S, _SSH_S, _RESULTS_S = 1.0, 60, 1800
_RESULT_TRIES = 3
_RESERVED = 4096
# How long a reboot may take, as in the keeper.
_AWAY_S = 1800
SSH = ("ssh", "-o", "ConnectTimeout=10")


def render_pack(folder: str, **options: object) -> list[str]:
    """Return the command that packs what must be kept of a job's folder on the node where it runs."""
    program = Path(ownership.__file__)
    here = Path(folder, "code/worker/storage", program.name)
    words = json.dumps({"folder": folder, **options})
    return [sys.executable, str(here if here.exists() else program), words]


def render_unpack(folder: str) -> str:
    """Return the shell command that unpacks it into the job's folder on the head."""
    return f"tar -C {shlex.quote(folder)} --anchored --exclude={ownership.REPORT} -xf -"


@dataclass
class HeadFolder:
    """The job's folder on the head. ``remote`` is the head's name, "" if this node is the head."""

    folder: str
    remote: str
    log: Path
    node: str = ""
    """The name of this node."""
    _offset: int = 0
    _ended: threading.Event = field(default_factory=threading.Event)
    _copier: threading.Thread | None = None

    def write(self, name: str, content: Mapping[str, object]) -> bool:
        """Write a JSON file atomically; return whether that worked."""
        target, text = shlex.quote(f"{self.folder}/{name}"), (json.dumps(content) + "\n").encode()
        # Overwriting works even on a full disk.
        script = f"cat 1<>{target}.partial && truncate -s {len(text)} {target}.partial"
        return self._run(f"{script} && mv {target}.partial {target}", text)

    def reserve(self, *names: str) -> None:
        """Reserve disk space for files that must be written in any case."""
        partial = " ".join(shlex.quote(f"{self.folder}/{name}.partial") for name in names)
        # An earlier attempt's reserve is kept.
        self._run(
            f"for f in {partial}; do [ -s $f ] || printf '%{_RESERVED}s' > $f; done 2>/dev/null"
        )

    def read(self, name: str) -> dict[str, Any]:
        """Return the content of a JSON file; {} if there is none, or the head does not answer for long."""
        path = shlex.quote(f"{self.folder}/{name}")
        for tried in range(_RESULT_TRIES):
            time.sleep(_TRIES_S if tried else 0)
            answer = ask(self.argv(f"[ ! -e {path} ] || cat {path}"), _SSH_S)
            if answer is not None:
                with suppress(ValueError, TypeError):
                    return dict(json.loads(answer))
                break
        return {}

    def remove(self, name: str) -> None:
        self._run(f"rm -f {shlex.quote(f'{self.folder}/{name}')}")

    def exists(self, name: str) -> bool:
        return self._run(f"test -e {shlex.quote(f'{self.folder}/{name}')}")

    def copy_log(self, offset: int) -> None:
        """Copy new lines of the log as they are written; the head's log may contain earlier attempts."""
        if not self.remote:
            return
        self._offset = offset
        self._copier = threading.Thread(target=self._copy_log, daemon=True)
        self._copier.start()

    def finish(self) -> None:
        """Copy the rest of the log."""
        self._ended.set()
        if self._copier:
            self._copier.join(_SSH_S)

    def wait(self, hurries: Callable[[], object], *, amid_line: bool = False) -> None:
        """Wait until the head answers: it may be rebooting, or `repair` may be replacing it.

        Gives up after :data:`_AWAY_S` seconds, or if the job ``hurries``. ``amid_line``: the log ends within
        a line.
        """
        until, is_away = time.monotonic() + _AWAY_S, False
        while self.remote and not self._run("true") and time.monotonic() < until and not hurries():
            if not is_away:
                is_away = True
                text = f"waiting for {self.remote}, which does not answer"
                announce(amid_line=amid_line, event="note", text=text)
            time.sleep(_TRIES_S)

    def send_results(self) -> None:
        """Copy the results."""
        if self.remote and not any(self._send_results() for _ in range(_RESULT_TRIES)):
            here = socket.gethostname()
            say(f"The results are on {here}; copying them to {self.remote} failed.")

    def _send_results(self) -> bool:
        packing = render_pack(self.folder, node=self.node, first=True)
        with subprocess.Popen(packing, stdout=subprocess.PIPE) as pack:
            done = succeeds(self.argv(render_unpack(self.folder)), _RESULTS_S, stdin=pack.stdout)
            if not done:
                pack.kill()
        return done and pack.returncode == 0

    def _run(self, script: str, content: bytes = b"") -> bool:
        with suppress(OSError, subprocess.TimeoutExpired):
            done = run_ssh(self.argv(script), timeout=_SSH_S, input=content)
            return done.returncode == 0
        return False

    def argv(self, script: str) -> list[str]:
        """Return the command that runs a shell script on the head."""
        return [*SSH, self.remote, script] if self.remote else ["sh", "-c", script]

    def _copy_log(self) -> None:
        """Send the log's new bytes until the head has all, over as many connections as that takes."""
        begin: int | None = None
        while True:
            there = self._remote_size()
            if there is None:
                time.sleep(_TRIES_S)
                continue
            begin = there if begin is None else begin
            sent = self._offset + there - begin
            if self._ended.is_set() and sent >= self.log.stat().st_size:
                return
            pipe = self._open_pipe(there)
            assert pipe.stdin is not None
            with self.log.open("rb") as file, suppress(OSError):
                file.seek(sent)
                has_ended = False
                while pipe.poll() is None and not has_ended:
                    has_ended = self._ended.wait(_TRIES_S / 4)
                    pipe.stdin.write(file.read())
                    pipe.stdin.flush()
            self._close(pipe)

    def _open_pipe(self, at: int) -> subprocess.Popen[bytes]:
        """Return a process that writes to the head's log from a position."""
        # Not appended: late bytes of a broken connection would then be duplicated.
        log = shlex.quote(f"{self.folder}/{self.log.name}")
        write = f"dd of={log} bs=64k oflag=seek_bytes seek={at} conv=notrunc status=none"
        return subprocess.Popen([*SSH, self.remote, write], stdin=subprocess.PIPE)

    def _close(self, pipe: subprocess.Popen[bytes]) -> None:
        assert pipe.stdin is not None
        with suppress(OSError, subprocess.TimeoutExpired):
            pipe.stdin.close()
            pipe.wait(_SSH_S)
        pipe.kill()
        pipe.wait()

    def _remote_size(self) -> int | None:
        log = shlex.quote(f"{self.folder}/{self.log.name}")
        script = f"mkdir -p {shlex.quote(self.folder)}; touch {log}; stat -c %s {log}"
        with suppress(ValueError):
            return int(ask(self.argv(script), _SSH_S) or "")
        return None
