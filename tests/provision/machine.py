"""A folder that stands in for a machine: the scripts for nodes run in it, with the real bash."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from provision.host import Result
from tests.fakes import StandInHost

# What a script calls with its full name or by way of "/": moved below the machine's folder.
_MOVED = re.compile(
    r"(?<![\w./}*])/(?=(?:etc|home|opt|proc/sys/kernel/random/boot_id|root|run|sys|tmp|var)\b)"
)
# No mistake in that may ever delete a file of the machine that the tests run on.
_SAFE_RM = """#!/bin/bash
for path in "$@"; do
    [[ "$path" == -* || "$(realpath -m -- "$path")" == {root}/* ]] || exit 99
done
exec /bin/rm "$@"
"""


@dataclass(frozen=True)
class Machine:
    """A root folder, a folder of replaced commands, and the record of their ``calls``."""

    folder: Path

    @staticmethod
    def make(folder: Path) -> Machine:
        machine = Machine(folder)
        for name in ("bin", "root/etc", "root/home", "root/root", "root/run", "root/tmp"):
            (folder / name).mkdir(parents=True)
        machine.root.joinpath("var/lib/cloud/instance").mkdir(parents=True)
        machine.replace("sudo", 'while [[ "$1" == -* ]]; do shift; done; exec "$@"')
        machine.replace("sync")
        (folder / "bin/rm").write_text(_SAFE_RM.format(root=machine.root))
        (folder / "bin/rm").chmod(0o755)
        return machine

    @property
    def root(self) -> Path:
        return self.folder / "root"

    @property
    def calls(self) -> list[str]:
        """Every call of a replaced command, in order."""
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def replace(self, command: str, body: str = "") -> None:
        """Replace a command, which also records its calls."""
        path = self.folder / "bin" / command
        path.write_text(f'#!/bin/bash\necho {command} "$*" >> {self.folder}/calls\n{body}\n')
        path.chmod(0o755)

    def path(self, absolute: str) -> Path:
        """The real path of a file of the machine."""
        return self.root / absolute.lstrip("/")

    def move(self, script: str) -> str:
        """A script with the machine's folder as its root."""
        script = _MOVED.sub("@root@/", script).replace("'s|^/||'", "'s|^@root@/||'")
        script = re.sub(r"(?<=\bcd |-C )/(?= )", "@root@", script)
        return script.replace('"/$path"', '"@root@/$path"').replace("@root@", str(self.root))

    def environment(self) -> dict[str, str]:
        return {
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
            "HOME": f"{self.root}/home/ubuntu",
        }

    def shell(
        self, script: str, *arguments: str, program: str = "bash"
    ) -> subprocess.CompletedProcess[str]:
        """Run a script as the machine would."""
        return subprocess.run(
            [program, "-c", self.move(script), program, *arguments],
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )


@dataclass
class ShellHost(StandInHost):
    """A host whose commands run in a folder."""

    machine: Machine
    name: str = "node0"

    def answer(self, command: str, timeout_s: float | None) -> Result:
        done = self.machine.shell(command)
        return Result(done.returncode, done.stdout, done.stderr)

    def put(self, content: bytes, path: str, mode: int = 0o600) -> None:
        self.machine.path(path).write_bytes(self.machine.move(content.decode()).encode())
