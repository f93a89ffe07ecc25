"""Training on more text than the memory holds: tokens and rows stay on the node's disk.

python -m benchmarks.large_data [--gb 20] [--memory-gb 8] [--ranks 2] [--task classify]     (root, cgroup v1)

Writes a JSON lines file of random words, and trains a few steps on it in a memory cgroup, where the kernel
kills what needs more. It takes five times the size of the text on the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import ROOT, finish

CGROUPS = Path("/sys/fs/cgroup/memory")
WORDS, WORDS_PER_ROW, STEPS = 20_000, 250, 5


def main() -> None:
    """Print the time of each phase, and whether the run stayed within the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=20)
    parser.add_argument("--memory-gb", type=float, default=8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--task", default="classify")
    parser.add_argument("--folder", type=Path, help="where there is enough room (default: /tmp)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        rows = write_text(folder / "train.jsonl", int(args.gb * 1e9))
        write_text(folder / "dev.jsonl", 200_000)
        began = time.perf_counter()
        codes, peak_gb, said = train(args, folder)
        seconds = time.perf_counter() - began
        missed = [] if set(codes) == {0} else [f"exit codes {codes}: {said[-1500:]}"]
        results = folder / "output" / "results.json"
        found = json.loads(results.read_text()) if results.exists() else {}
    finish(
        missed,
        benchmark="large_data",
        task=args.task,
        text_gb=args.gb,
        rows=rows,
        memory_gb=args.memory_gb,
        ranks=args.ranks,
        own_memory_gb=peak_gb,
        seconds=round(seconds, 1),
        phase_seconds=found.get("seconds"),
    )


def write_text(path: Path, size: int) -> int:
    """Write rows with about ``size`` bytes of text; return their number."""
    draw = random.Random(1)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = ["".join(draw.choices(letters, k=draw.randint(2, 9))) for _ in range(WORDS)]
    written = rows = 0
    with path.open("w") as file:
        while written < size:
            text = " ".join(draw.choices(words, k=WORDS_PER_ROW))
            written += file.write(f'{{"text": "{text} {rows}", "label": "{rows % 2}"}}\n')
            rows += 1
    return rows


def train(args: argparse.Namespace, folder: Path) -> tuple[list[int], float, str]:
    """Return the ranks' exit codes, the most memory that was not a cache of files, in GB, and the log."""
    group = CGROUPS / f"large-data-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(int(args.memory_gb * 1e9)))
        argv = [sys.executable, "-m", "worker.tasks", args.task, "--model=scratch", "--dtype=fp32"]
        argv += [f"--data={folder / 'train.jsonl'}", f"--eval={folder / 'dev.jsonl'}"]
        argv += [f"--max-steps={STEPS}", f"--token-cache={folder / 'cache'}", "--compile=off"]
        argv += ["--max-length=128", "--batch-size=8", f"--output={folder / 'output'}"]
        environ = {**os.environ, "PYTHONPATH": str(ROOT / "jobs"), "OMP_NUM_THREADS": "1"}
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29123", "GLOO_SOCKET_IFNAME": "lo"}
        log, running = (folder / "log").open("w+"), list[subprocess.Popen[bytes]]()
        for rank in range(args.ranks):
            own = {**environ, "PMI_RANK": str(rank), "PMI_SIZE": str(args.ranks)}
            enter = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
            running.append(subprocess.Popen([*enter, *argv], env=own, stdout=log, stderr=log))
        peak = 0
        while any(process.poll() is None for process in running):
            time.sleep(0.5)
            stat = (group / "memory.stat").read_text().split("\n")
            peak = max(peak, *(int(line.split()[1]) for line in stat if line.startswith("rss ")))
        log.seek(0)
        return [process.wait() for process in running], round(peak / 1e9, 2), log.read()
    finally:
        group.rmdir()


if __name__ == "__main__":
    main()
