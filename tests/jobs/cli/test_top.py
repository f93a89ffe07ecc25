"""`top` as a command: its forms without a terminal, and the view in a real one."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from jobs.__main__ import main
from provision.host import Result
from tests.harness.command_line import CommandLine
from tests.jobs.top.samples import Recorded, make_line, make_node, play_snapshots

ROOT = Path(__file__).parents[3]


_PLAY = """import pytest, sys
from jobs.__main__ import main
from tests.jobs.top.samples import play_snapshots
play_snapshots(pytest.MonkeyPatch())
sys.exit(main(["top"]))
"""


def test_without_a_terminal_it_prints_one_snapshot(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    play_snapshots(monkeypatch)
    assert main(["top"]) == 0

    out = capsys.readouterr().out
    assert out.startswith("bert  3 nodes  $2.50 so far")
    assert sum(line.startswith("  rank ") for line in out.splitlines()) == 6
    assert "q quits" not in out
    assert main(["top", "--once"]) == 0
    assert capsys.readouterr().out == out
    assert main(["top", "--json"]) == 0
    assert capsys.readouterr().out == json.dumps(asdict(Recorded().first())) + "\n"


def test_it_asks_the_head_of_a_cluster(line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    line.begin("--nodes", "1")
    answer = make_line([make_node(0)], cluster="", usd=None)
    line.stage("node0", "^exec python3", Result(0, answer, ""))

    found = json.loads(line.must("top", "--json").out)

    assert found["cluster"] == "spr"
    assert 0 < found["usd"] < 10
    assert 0 < found["ttl_left_s"] <= 8 * 3600
    assert found["nodes"][0]["ranks"][0]["step"] == 1200

    monkeypatch.setattr("jobs.top.collect._FIRST_S", 0.0)
    line.machines.staged.clear()
    line.stage("node0", "^exec python3", Result(127, "bash: python3: not found", ""))

    failed = line.run("top", "--once", "--interval", "0.5")

    assert failed.code == 1
    assert "the head sends no figures: the head says: bash: python3: not found" in failed.err


@dataclass
class Viewer:
    """`top` on a terminal of its own."""

    process: subprocess.Popen[bytes]
    terminal: int
    shown: bytes = b""

    def see(self, text: str) -> None:
        """Wait until the terminal has shown a text."""
        deadline = time.monotonic() + 60
        while text.encode() not in self.shown:
            assert time.monotonic() < deadline, self.shown
            if select.select([self.terminal], [], [], 0.1)[0]:
                self.shown += os.read(self.terminal, 65536)

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def end(self) -> int:
        """Read what it still shows and return its exit code."""
        with suppress(OSError):  # the terminal's other end is closed
            while text := os.read(self.terminal, 65536):
                self.shown += text
        return self.process.wait(60)


@pytest.fixture
def view() -> Iterator[Callable[[int, int], Viewer]]:
    """Starts `top` on a terminal of that size."""
    viewers: list[Viewer] = []
    unset = {"COLUMNS", "LINES", "NO_COLOR"}
    environ = {name: text for name, text in os.environ.items() if name not in unset}

    def view(width: int, height: int) -> Viewer:
        terminal, end = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-c", _PLAY],
            stdin=end,
            stdout=end,
            stderr=end,
            cwd=ROOT,
            env={**environ, "TERM": "xterm-256color"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(end)
        viewers.append(Viewer(process, terminal))
        viewers[-1].resize(width, height)
        return viewers[-1]

    yield view
    for viewer in viewers:
        viewer.process.kill()
        viewer.process.wait()
        os.close(viewer.terminal)


@pytest.mark.parametrize(("key", "code"), [(b"q", 0), (b"\x03", 0), (b"", 143)])
def test_the_view_plays_follows_the_terminals_size_and_ends(
    view: Callable[[int, int], Viewer], key: bytes, code: int
) -> None:
    viewer = view(80, 24)
    viewer.see("q quits")
    viewer.see("  rank ")
    assert b"CPUs 24-47" not in viewer.shown

    viewer.resize(200, 50)
    viewer.see("CPUs 24-47")
    viewer.see("$2.50 so far")
    assert b"$1.50 so far" in viewer.shown
    if key:
        os.write(viewer.terminal, key)
    else:
        viewer.process.terminate()
    assert viewer.end() == code
    # The screen and the cursor are as they were.
    assert viewer.shown.rindex(b"\x1b[?1049l") > viewer.shown.rindex(b"\x1b[?1049h")
    assert b"\x1b[?25h" in viewer.shown
    assert b"Traceback" not in viewer.shown
