"""A job's folder into S3: boto3's transfer beside AWS's C runtime, and what a running job pays for it.

moto's server stands for S3, with ``--step`` at the lowest priority, because S3 takes no CPU of nodes.
``--step`` runs matrix products on every core, in turns alone and while a checkpoint is stored the way the
supervisor does it; ``slower_in_all`` is for one checkpoint in each default interval.
It takes an idle machine; the spread of the turns without a push shows whether it was.
"""

from __future__ import annotations

import argparse
import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import boto3
import numpy as np
from boto3.s3.transfer import TransferConfig, create_transfer_manager
from botocore.session import Session
from s3transfer.crt import (
    BotocoreCRTCredentialsWrapper,
    BotocoreCRTRequestSerializer,
    CRTTransferManager,
    create_s3_crt_client,
)

from benchmarks.common import ROOT, finish
from benchmarks.data_in import serving
from jobs.worker.supervisor.commands import LOW_PRIORITY
from jobs.worker.training.checkpoints import EVERY_SECONDS

_BUCKET, _FILES, _PART = "data", 4, 16 << 20
_STEP_BAR, _ALONE_S = 0.01, 20.0


def make_files(folder: Path, megabytes: int) -> list[Path]:
    folder.mkdir(parents=True)
    block, files = os.urandom(1_000_000), []
    for number in range(_FILES):
        path = folder / f"state-{number}.pt"
        with path.open("wb") as file:
            for index in range(megabytes // _FILES):
                file.write(index.to_bytes(8, "big") + block[8:])
        files.append(path)
    return files


def connect_ways() -> dict[str, Callable[[], Any]]:
    """Return how each library's transfer manager is made.

    boto3's own way to the C runtime always speaks TLS, also to a plain endpoint.
    """
    config = TransferConfig(
        multipart_chunksize=_PART, multipart_threshold=_PART, preferred_transfer_client="classic"
    )
    session, place = Session(), {"region_name": os.environ["AWS_DEFAULT_REGION"]}
    keys = BotocoreCRTCredentialsWrapper(session.get_credentials())
    runtime = create_s3_crt_client(
        place["region_name"],
        crt_credentials_provider=keys.to_crt_credentials_provider(),
        part_size=_PART,
        use_ssl=False,
    )
    where = {**place, "endpoint_url": os.environ["AWS_ENDPOINT_URL_S3"]}
    serializer = BotocoreCRTRequestSerializer(session, where)
    return {
        "classic": lambda: create_transfer_manager(boto3.client("s3"), config),
        "crt": lambda: CRTTransferManager(runtime, serializer),
    }


def transfer(manager: Any, files: list[Path], target: Path | None) -> tuple[float, float]:
    """Upload the files, or download them to a folder; return the seconds, and this process's CPU seconds."""
    began, cpu = time.monotonic(), time.process_time()
    with manager:
        if target:
            jobs = [manager.download(_BUCKET, path.name, str(target / path.name)) for path in files]
        else:
            jobs = [manager.upload(str(path), _BUCKET, path.name) for path in files]
        for each in jobs:
            each.result()
    return time.monotonic() - began, time.process_time() - cpu


def compare_ways(root: Path, megabytes: int, rounds: int) -> dict[str, Any]:
    """Return the medians of both libraries, which take turns."""
    files, ways = make_files(root / "files", megabytes), connect_ways()
    target = root / "arrived"
    target.mkdir()
    found: dict[str, list[tuple[float, float]]] = {}
    for number in range(rounds):
        for way in sorted(ways, reverse=bool(number % 2)):
            for verb, place in (("upload", None), ("download", target)):
                took = transfer(ways[way](), files, place)
                found.setdefault(f"{verb} {way}", []).append(took)
                print(verb, way, *(f"{each:.2f}" for each in took), flush=True)
            if any((target / path.name).read_bytes() != path.read_bytes() for path in files):
                raise SystemExit(f"{way}: the files differ")
    figures: dict[str, Any] = {}
    for name, rows in found.items():
        seconds, cpu = (statistics.median(column) for column in zip(*rows, strict=True))
        figures[name] = {"mb_per_s": round(megabytes / seconds), "cpu_s": round(cpu, 2)}
    for verb in ("upload", "download"):
        pairs = zip(found[f"{verb} classic"], found[f"{verb} crt"], strict=True)
        ratio = statistics.median(own[0] / other[0] for own, other in pairs)
        figures[f"{verb}: crt is faster by"] = round(ratio, 2)
    return figures


def run_steps(seconds: float, until: Callable[[], bool] = lambda: True) -> tuple[float, float]:
    """Run steps on all cores, at least some seconds; return the mean seconds of one, and of all."""
    rows = np.random.default_rng(1).standard_normal((512, 512), dtype=np.float32)
    began, steps = time.monotonic(), 0
    while time.monotonic() - began < seconds or not until():
        rows = rows @ rows
        rows /= np.abs(rows).max()
        steps += 1
    took = time.monotonic() - began
    return took / steps, took


def measure_step(root: Path, megabytes: int, turns: int) -> dict[str, Any]:
    """Return what storing a checkpoint costs the steps beside it, without S3's own share."""
    job = root / "squad-1"
    url = f"s3://{_BUCKET}/team/{job.name}"
    rows = []
    for number in range(turns):
        make_checkpoint(job, number, megabytes)
        alone, _ = run_steps(_ALONE_S)
        before = read_cpu_s()
        push = start_push(job, url)
        beside, took = run_steps(0, lambda push=push: push.poll() is not None)  # type: ignore[misc]
        own, server = (after - each for each, after in zip(before, read_cpu_s(), strict=True))
        if push.returncode:
            raise SystemExit("the push failed")
        slower, share = beside / alone - 1, own / (own + server)
        lost = took * (1 - alone / beside) * share
        rows.append((alone, slower * share, slower, took, own, server, lost / EVERY_SECONDS))
        print(*(f"{each:.4g}" for each in rows[-1]), flush=True)
    names = (
        "step_s slower_while_storing with_server storing_s push_cpu_s server_cpu_s slower_in_all"
    )
    figures = {
        name: float(f"{statistics.median(column):.4g}")
        for name, column in zip(names.split(), zip(*rows, strict=True), strict=True)
    }
    noise = statistics.median(abs(one[0] / other[0] - 1) for one, other in pairwise(rows))
    return figures | {"noise": round(noise, 4), "megabytes": megabytes}


def read_cpu_s() -> tuple[float, float]:
    """Return the CPU seconds of ended children, and of running ones: pushes, and S3's server."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    running = 0.0
    for task in Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text().split():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            running += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return ended.ru_utime + ended.ru_stime, running


def make_checkpoint(job: Path, number: int, megabytes: int) -> None:
    folder = job / f"output.state/checkpoints/step-{number:06d}"
    make_files(folder, megabytes)
    (folder / "checkpoint.json").write_text("{}")


def start_push(job: Path, url: str) -> subprocess.Popen[bytes]:
    """Start what the supervisor starts for each new checkpoint."""
    words = [sys.executable, "-m", "worker.storage.push", "checkpoint", str(job), url]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "jobs")}
    argv = ["sh", "-c", f"{LOW_PRIORITY} {shlex.join(words)}"]
    return subprocess.Popen(argv, env=environ, stdout=subprocess.DEVNULL, start_new_session=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("--mb", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step", action="store_true", help="what a running job pays")
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="spr-s3-") as name,
        serving(Path(name), nice=19 if args.step else 0) as url,
    ):
        os.environ["AWS_ENDPOINT_URL_S3"] = url
        boto3.client("s3").create_bucket(Bucket=_BUCKET)
        if not args.step:
            finish([], **compare_ways(Path(name), args.mb, args.rounds))
        figures = measure_step(Path(name), args.mb, args.rounds)
    missed = ["steps are slower by more than 1 %"] if figures["slower_in_all"] > _STEP_BAR else []
    finish(missed, **figures)


if __name__ == "__main__":
    main()
