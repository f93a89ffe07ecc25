"""One-way delays on the critical path of a training step, by collective, for 2 to 16 nodes.

Each rank has its own network namespace. A process carries the packets between them, and from some step
on it holds back each for a fixed time. It needs root and /dev/net/tun. The model is tiny, so that a step is
little else than its messages.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import heapq
import json
import mmap
import os
import select
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from jobs.worker.tasks.squad.task import DEMO, Squad
from jobs.worker.training import model
from jobs.worker.training import run as job

from .common import finish

WARM_UPS, EACH, DELAY = 8, 10, 0.03
"""Steps before any that counts, steps with and without delays, and the delay in seconds."""
STEPS = WARM_UPS + 2 * EACH + 1
NAMES = {"gather_later": "reports", "_find_rows": "rows seen", "_agree_on_layers": "layers"}
TUN_SET, TUN, NO_HEADER, MTU = 0x400454CA, 1, 0x1000, "60000"
SHAPE = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}


def make_node(number: int) -> int:
    """Create a namespace with an interface, and return the interface's other end."""
    name, tun = f"spr-hops{number}", os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tun, TUN_SET, struct.pack("16sH22x", name.encode(), TUN | NO_HEADER))
    for command in (
        f"netns add {name}",
        f"link set {name} netns {name}",
        f"-n {name} addr add 10.77.0.{number}/24 dev {name}",
        f"-n {name} link set {name} mtu {MTU} up",
        f"-n {name} link set lo up",
    ):
        subprocess.run(["ip", *command.split()], check=True)
    return tun


def carry(tuns: list[int], delays: mmap.mmap) -> None:
    """Pass on each packet to the node of its address, forever; after the delay if ``delays`` say so."""
    waiting: list[tuple[float, int, bytes]] = []
    for count in iter(lambda: len(waiting), None):
        until = max(0.0, waiting[0][0] - time.monotonic()) if count else None
        for tun in select.select(tuns, [], [], until)[0]:
            packet = os.read(tun, 65536)
            if packet[0] >> 4 == 4 and 0 < packet[19] <= len(tuns):
                due = time.monotonic() + DELAY * delays[0]
                heapq.heappush(waiting, (due, packet[19] - 1, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            os.write(tuns[waiting[0][1]], heapq.heappop(waiting)[2])


def train(rank: int, size: int, folder: str, delays: mmap.mmap) -> None:
    """Train as one rank; rank 0 writes each step's seconds, and those that it waited for each collective."""
    with Path(f"/run/netns/spr-hops{rank + 1}").open() as namespace:
        assert not ctypes.CDLL(None).setns(namespace.fileno(), 0)
    os.environ |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29600", "PMI_SIZE": str(size)}
    os.environ |= {"PMI_RANK": str(rank), "GLOO_SOCKET_IFNAME": f"spr-hops{rank + 1}"}
    torch.set_num_threads(1)
    model.SCRATCH_SHAPE = SHAPE
    begins = [0.0]
    waits: list[dict[str, float]] = [defaultdict(float)]

    def timed(function: Any, name: str = "") -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            callers, begin = [sys._getframe(n).f_code.co_name for n in (1, 2)], time.perf_counter()
            label = name or NAMES.get(callers[0], NAMES.get(callers[1], callers[0]))
            found = function(*arguments, **named)
            if threading.current_thread() is threading.main_thread():
                waits[-1][label] += time.perf_counter() - begin
            if not isinstance(found, dist.Work):
                return found
            # What is not waited for costs nothing.
            return argparse.Namespace(get_future=found.get_future, wait=timed(found.wait, label))

        return call

    for name in ("all_reduce", "all_gather", "all_gather_object", "broadcast", "all_to_all_single"):
        setattr(dist, name, timed(getattr(dist, name)))
    replica: Any = DistributedDataParallel
    replica._sync_buffers = timed(replica._sync_buffers, "buffers")
    plain = vars(job)["take_step"]

    def take(*arguments: Any) -> Any:
        waits[-1]["step"] = time.perf_counter() - begins[-1]
        begins.append(time.perf_counter())
        waits.append(defaultdict(float))
        delays[0] = len(begins) > WARM_UPS + EACH
        return plain(*arguments)

    vars(job)["take_step"] = take
    options = replace(DEMO, output=folder, backend="gloo", max_steps=STEPS, epochs=STEPS)
    options = replace(options, batch_size=1, compile="off", eval_every="never")
    assert not job.run_task(Squad, replace(options, checkpoint_every=STEPS))
    if rank == 0:
        Path(folder, "hops.json").write_text(json.dumps(waits))


def fork(work: Any, *arguments: Any) -> int:
    """Run a function in a child, and return its process ID."""
    if child := os.fork():
        return child
    os.dup2(2, 1)  # events
    try:
        work(*arguments)
        os._exit(0)
    finally:
        os._exit(1)


def measure(size: int) -> dict[str, float]:
    """Return what delays add to a step and to its waits, in delays."""
    delays = mmap.mmap(-1, 1)
    with tempfile.TemporaryDirectory() as folder:
        relay = fork(carry, [make_node(number + 1) for number in range(size)], delays)
        try:
            ranks = [fork(train, rank, size, folder, delays) for rank in range(size)]
            assert sum(os.waitpid(each, 0)[1] for each in ranks) == 0
        finally:
            os.kill(relay, 9)
            os.waitpid(relay, 0)
            for number in range(size):
                subprocess.run(["ip", "netns", "del", f"spr-hops{number + 1}"], check=True)
        waits = json.loads(Path(folder, "hops.json").read_text())[WARM_UPS + 1 :]
    found = {}
    for name in sorted({name for one in waits for name in one}):
        seconds = [one.get(name, 0.0) for one in waits]
        without, with_delays = median(seconds[:EACH]), median(seconds[EACH + 1 : 2 * EACH])
        found[name] = (with_delays - without) / DELAY
    found["gradients"] = 2 * found["step"] - sum(found.values())
    return {name: round(value, 1) for name, value in found.items()}


def main() -> None:
    finish([], one_way_delays={str(size): measure(size) for size in (2, 4, 8, 16)})


if __name__ == "__main__":
    main()
