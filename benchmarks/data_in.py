"""Data from S3 to four nodes: seconds and bytes per node, and a changed object.

Without ``--name``, four processes with a home folder each stand for the nodes, and moto's server for S3. With
it, `run --data` on a cluster does the same; ``--url`` is a new object in a bucket that the nodes and this
machine can use (AWS_ENDPOINT_URL_S3 names another S3 than Amazon's).
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
from boto3.s3.transfer import TransferConfig

from benchmarks.common import ROOT, finish

_URL = "s3://data/set/train.bin"
_ARRIVED = re.compile(r"(\w+): s3://\S+: ([\d,.]+) MB in ([\d.]+) s")
_CHANGED, _CACHED = "has changed since the last job", "already on this node"
# moto's server would read the whole object for each range of it.
_SERVER = """import logging, sys
from flask import has_request_context, request
from moto.s3.models import FakeKey
from moto.server import main

class Ranges(bytes):
    def __new__(cls, key):
        found = super().__new__(cls)
        found.key = key
        return found

    def __len__(self):
        return self.key.contentsize

    def __getitem__(self, part):
        with self.key.lock:
            self.key._value_buffer.seek(part.start)
            return self.key._value_buffer.read(part.stop - part.start)

whole = FakeKey.value.fget
FakeKey.value = FakeKey.value.getter(
    lambda key: Ranges(key) if has_request_context() and "Range" in request.headers else whole(key)
)
logging.getLogger("werkzeug").setLevel(logging.ERROR)
main(["-H", "127.0.0.1", "-p", sys.argv[1]])
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("--name", help="a cluster; default: processes on this machine")
    parser.add_argument("--cloud", default="local")
    parser.add_argument("--url", default=_URL)
    parser.add_argument("--mb", type=int, default=2000)
    parser.add_argument("--nodes", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="spr-data-") as root:
        if args.name:
            measure(OnCluster(args, Path(root)), args)
        with serving(Path(root)) as url:
            os.environ["AWS_ENDPOINT_URL_S3"] = url
            boto3.client("s3").create_bucket(Bucket="data")
            measure(OnThisMachine(args, Path(root)), args)


@contextmanager
def serving(root: Path, nice: int = 0) -> Iterator[str]:
    """Run moto's server in a separate process."""
    keys = {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    os.environ.update(keys, TMPDIR=str(root))
    argv = ["nice", "-n", str(nice), sys.executable, "-c", _SERVER, "5999"]
    with subprocess.Popen(argv, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as server:
        time.sleep(5)
        try:
            yield "http://127.0.0.1:5999"
        finally:
            server.terminate()


def upload(url: str, megabytes: int, seed: int, root: Path) -> int:
    """Replace the object; return its size."""
    bucket, _, key = url.removeprefix("s3://").partition("/")
    source, size = root / "source", megabytes * 1_000_000
    block = random.Random(seed).randbytes(1_000_000)
    with source.open("wb") as file:
        for number in range(megabytes):
            file.write(number.to_bytes(8, "big") + block[8:])
    config = TransferConfig(multipart_chunksize=64 << 20, max_concurrency=2)
    boto3.client("s3").upload_file(str(source), bucket, key, Config=config)
    source.unlink()
    return size


class OnThisMachine:
    """A process and a home folder stand for each node."""

    def __init__(self, args: argparse.Namespace, root: Path) -> None:
        self.names, self.root, self.url = [f"node{n}" for n in range(args.nodes)], root, args.url
        self.job = 0

    def start(self, names: Sequence[str], endpoint: str = "") -> list[subprocess.Popen[str]]:
        started = []
        for name in names:
            home = self.root / name
            home.mkdir(exist_ok=True)
            environ = {**os.environ, "HOME": str(home)}
            environ["AWS_ENDPOINT_URL_S3"] = endpoint or environ["AWS_ENDPOINT_URL_S3"]
            target = home / "spr-jobs" / f"job-{self.job}" / "data" / "x"
            argv = [sys.executable, "-m", "jobs.worker.storage.stage", "--node", name]
            argv += [self.url, str(target)]
            options: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
            started.append(subprocess.Popen(argv, env=environ, **options))
        return started

    def run(self) -> str:
        """Bring the data to all nodes; return the log."""
        self.job += 1
        return "".join(process.communicate()[0] for process in self.start(self.names))


class OnCluster:
    """`run --data` on a cluster."""

    def __init__(self, args: argparse.Namespace, root: Path) -> None:
        self.names = [f"node{n}" for n in range(args.nodes)]
        self.root, self.url = root, args.url
        self.flags = [f"--name={args.name}", f"--cloud={args.cloud}"]

    def _argv(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "jobs", words[0], *self.flags, *words[1:]]

    def start(self, *more: str) -> subprocess.Popen[str]:
        words = (f"--nodes={len(self.names)}", "--folder=none", f"--data={self.url}", "--ppn=1")
        results = tempfile.mkdtemp(dir=self.root)
        argv = self._argv("run", *words, *more, f"--results={results}/x", "--", "true")
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(argv, text=True, cwd=ROOT, **options)

    def run(self) -> str:
        return self.start().communicate()[0]


def arrivals(log: str) -> list[dict[str, Any]]:
    """Return each node's megabytes and seconds."""
    return [
        {"node": node, "mb": float(mb.replace(",", "")), "seconds": float(seconds)}
        for node, mb, seconds in _ARRIVED.findall(log)
    ]


def measure(nodes: OnThisMachine | OnCluster, args: argparse.Namespace) -> None:
    missed = []
    size = upload(nodes.url, args.mb, 1, nodes.root)
    began = time.monotonic()
    first = nodes.run()
    seconds, rows = time.monotonic() - began, arrivals(first)
    print(first[-2000:], flush=True)
    if len(rows) != len(nodes.names) or any(abs(row["mb"] * 1e6 - size) > 1e5 for row in rows):
        missed.append("not every node has the data")
    again = nodes.run().count(_CACHED)
    if again != len(nodes.names):
        missed.append("the second job downloaded something")
    upload(nodes.url, args.mb // 10, 2, nodes.root)
    noticed = nodes.run().count(_CHANGED)
    if noticed != len(nodes.names):
        missed.append("a change was not noticed")
    figures = {"nodes": rows, "seconds": round(seconds, 1), "mb": size / 1e6, "cached": again}
    # The data's only way is from S3 to the nodes: the client has no code that reads them.
    finish(missed, **figures, change_noticed=noticed)


if __name__ == "__main__":
    main()
