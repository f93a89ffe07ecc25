"""From a changed line to its first output, on a cluster that is there.

python -m benchmarks.dev_loop --name NAME [--mb 2]

Each round takes the project's first start, a start with one line changed, and one with a package added. Of
each: seconds until the program's first output and until the command's end, and the bytes that crossed the
connection to the head.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import finish

BAR_S, BAR_BYTES = 4.0, 1_000_000
FILES = 400
_DEADLINE_S = 600
_SENT = re.compile(r"sent [\d,]+ changed files?, ([\d.]+) (bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@dataclass(frozen=True)
class Start:
    """One start: seconds to the first output and to the end, and bytes sent."""

    first_s: float
    whole_s: float
    sent: int


def make_project(root: Path, seed: int, size: int) -> None:
    """Write files of ``size`` bytes together, and the program."""
    chance = random.Random(seed)
    for number in range(FILES):
        path = root / f"package{number % 20}" / f"module{number}.bin"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(chance.randbytes(size // FILES))
    (root / "spr-cluster.toml").touch()
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    write_program(root, 0)


def write_program(root: Path, version: int) -> None:
    # In one piece: with many ranks, print's pieces would mix.
    (root / "main.py").write_text(f"import os\nos.write(1, b'version {version}\\n')\n")


def start(root: Path, options: list[str], version: int) -> Start:
    """Run the program; its output must be that of this version, once per rank."""
    began, first, text = time.perf_counter(), 0.0, ""
    argv = [sys.executable, "-m", "jobs", "run", *options, "--", "python", "main.py"]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    with subprocess.Popen(
        argv, cwd=root, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as running:
        assert running.stdout is not None
        for line in running.stdout:
            text += line
            if not first and line.startswith("version"):
                first = time.perf_counter() - began
        code = running.wait(_DEADLINE_S)
    if code or not first or f"version {version}\n" not in text:
        raise SystemExit(f"exit code {code}, version {version}:\n{text}")
    found = _SENT.search(text)
    sent = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    return Start(first, time.perf_counter() - began, sent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--name", default="spr", help="the cluster")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mb", type=int, default=200, help="size of the project")
    parser.add_argument("--package", default="iniconfig", help="a small package to add")
    args = parser.parse_args()
    rows: dict[str, list[Start]] = {"first": [], "line": [], "package": []}
    options = ["--name", args.name, "--large-files"]
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(args.rounds):
            root = Path(folder, f"project-{turn}")
            root.mkdir()
            make_project(root, time.time_ns(), args.mb * 10**6)
            rows["first"].append(start(root, options, 0))
            write_program(root, 1)
            rows["line"].append(start(root, options, 1))
            (root / "requirements.txt").write_text(f"{args.package}>=0.{turn}\n")
            rows["package"].append(start(root, options, 1))
    medians = {
        f"{name}_{what}": round(statistics.median(getattr(each, what) for each in found), 2)
        for name, found in rows.items()
        for what in ("first_s", "whole_s", "sent")
    }
    missed = [f"{BAR_S:g} s"] if medians["line_first_s"] > BAR_S else []
    missed += ["1 MB"] if medians["line_sent"] > BAR_BYTES else []
    finish(
        missed,
        benchmark="dev_loop",
        rounds=args.rounds,
        project_mb=args.mb,
        **medians,
    )


if __name__ == "__main__":
    main()
