"""What a network between nodes adds to training steps: its delays, or its speed.

python -m benchmarks.hops [--efficiency]

Each rank has its own network namespace. A process carries the packets between them. It needs root and
/dev/net/tun. Without ``--efficiency``: one-way delays on the critical path of a step, by collective, for 2 to
16 nodes. From some step on, each packet is held back for a fixed time. The model is tiny, so that a step is
little else than its messages.

With it: how fast nodes train relative to one node, as measured and by a model, where each sends and receives
at most 25 Gbit/s. Computing is replaced by sleeping, the layers' gradients are 20 times smaller than
DistilBERT's, and all is slowed down alike, so that few CPUs carry 16 ranks' messages. It takes 10 minutes.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import heapq
import json
import math
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
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parallel import DistributedDataParallel

from jobs.worker.fast import communication
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
LAYERS, SCALE, SLOWER, STEP, GBIT = 6, 20, 64, 0.25, 25
"""DistilBERT's layers, its parameters relative to those of ``SMALL``, the time here relative to that of
nodes, and their seconds of computing per step and Gbit/s."""
SMALL = {"dim": 168, "n_layers": LAYERS, "n_heads": 4, "hidden_dim": 672}
RATE = GBIT * 1e9 / 8 / SCALE / SLOWER
MEASURED = 3
"""Steps, after two that are not, and before one."""


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
        # What waits for its turn is not lost.
        f"-n {name} route change 10.77.0.0/24 dev {name} rto_min 60s",
    ):
        subprocess.run(["ip", *command.split()], check=True)
    return tun


def carry(tuns: list[int], delays: mmap.mmap, rate: float = math.inf) -> None:
    """Pass on each packet to the node of its address, forever; after the delay if ``delays`` say so.

    Each node sends and receives ``rate`` bytes per second.
    """
    waiting: list[tuple[float, int, bytes]] = []
    sent, received = [0.0] * len(tuns), [0.0] * len(tuns)
    for count in iter(lambda: len(waiting), None):
        until = max(0.0, waiting[0][0] - time.monotonic()) if count else None
        for tun in select.select(tuns, [], [], until)[0]:
            packet = os.read(tun, 65536)
            if packet[0] >> 4 == 4 and 0 < packet[19] <= len(tuns):
                source, to, took = packet[15] - 1, packet[19] - 1, len(packet) / rate
                sent[source] = max(time.monotonic(), sent[source]) + took
                received[to] = max(sent[source], received[to] + took)
                heapq.heappush(waiting, (received[to] + DELAY * delays[0], to, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            os.write(tuns[waiting[0][1]], heapq.heappop(waiting)[2])


def enter(node: int, rank: int, size: int) -> None:
    """Become a rank in the namespace of a node."""
    with Path(f"/run/netns/spr-hops{node + 1}").open() as namespace:
        assert not ctypes.CDLL(None).setns(namespace.fileno(), 0)
    first = f"10.77.0.{node + 1 if size == 1 else 1}"
    os.environ |= {"MASTER_ADDR": first, "MASTER_PORT": "29600", "PMI_SIZE": str(size)}
    os.environ |= {"PMI_RANK": str(rank), "GLOO_SOCKET_IFNAME": f"spr-hops{node + 1}"}
    torch.set_num_threads(1)


def run_steps(folder: str, steps: int) -> None:
    options = replace(DEMO, output=folder, backend="gloo", max_steps=steps, epochs=steps)
    options = replace(options, batch_size=1, compile="off", eval_every="never")
    assert not job.run_task(Squad, replace(options, checkpoint_every=steps))


def train_slowly(node: int, size: int, folder: str, _: mmap.mmap) -> None:
    """Train as one of ``size`` ranks, with layers as slow as a node's; rank 0 writes each step's begin."""
    enter(node, node if size > 1 else 0, size)
    model.SCRATCH_SHAPE, begins, plain = SMALL, list[float](), vars(job)["take_step"]
    vars(communication)["BUCKET_MB"] /= SCALE
    vars(dist)["_DEFAULT_FIRST_BUCKET_BYTES"] //= SCALE
    layer = STEP * SLOWER / LAYERS / 3

    def compute(module: Any, _: Any, output: Any) -> None:
        if type(module).__name__ == "TransformerBlock" and torch.is_grad_enabled():
            time.sleep(layer)
            first = output[0] if isinstance(output, tuple) else output
            first.register_hook(lambda _: time.sleep(2 * layer))

    def take(*arguments: Any) -> Any:
        begins.append(time.perf_counter())
        return plain(*arguments)

    register_module_forward_hook(compute)
    vars(job)["take_step"] = take
    run_steps(f"{folder}/{node}" if size == 1 else folder, MEASURED + 3)
    if node == 0:
        Path(folder, "hops.json").write_text(json.dumps(begins))


def train(rank: int, size: int, folder: str, delays: mmap.mmap) -> None:
    """Train as one rank; rank 0 writes each step's seconds, and those that it waited for each collective."""
    enter(rank, rank, size)
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
    run_steps(folder, STEPS)
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


def run(size: int, work: Any, *arguments: Any, **relay: Any) -> tuple[Any, float]:
    """Run a function on each node; return what rank 0 has written, and the mean of the bytes sent."""
    delays, names = mmap.mmap(-1, 1), [f"spr-hops{number + 1}" for number in range(size)]
    with tempfile.TemporaryDirectory() as folder:
        tuns = [make_node(number + 1) for number in range(size)]
        carrier = fork(partial(carry, **relay), tuns, delays)
        try:
            ranks = [fork(work, rank, *arguments, folder, delays) for rank in range(size)]
            assert sum(os.waitpid(each, 0)[1] for each in ranks) == 0
            words = [["ip", "-s", "-j", "-n", name, "link", "show", name] for name in names]
            shown = [json.loads(subprocess.check_output(each)) for each in words]
        finally:
            os.kill(carrier, 9)
            os.waitpid(carrier, 0)
            for tun, name in zip(tuns, names, strict=True):
                os.close(tun)
                subprocess.run(["ip", "netns", "del", name], check=True)
        written = json.loads(Path(folder, "hops.json").read_text())
    return written, sum(each[0]["stats64"]["tx"]["bytes"] for each in shown) / size


def measure_delays(size: int) -> dict[str, float]:
    """Return what delays add to a step and to its waits, in delays."""
    waits = run(size, train, size)[0][WARM_UPS + 1 :]
    found = {}
    for name in sorted({name for one in waits for name in one}):
        seconds = [one.get(name, 0.0) for one in waits]
        without, with_delays = median(seconds[:EACH]), median(seconds[EACH + 1 : 2 * EACH])
        found[name] = (with_delays - without) / DELAY
    found["gradients"] = 2 * found["step"] - sum(found.values())
    return {name: round(value, 1) for name, value in found.items()}


def measure_efficiency(sizes: tuple[int, ...]) -> dict[str, dict[str, float]]:
    """Return the speed of each node relative to one that trains alone, measured and modeled, by their number.

    The model: a layer's gradients are sent once they are known, one layer after the other, and the rest, the
    rows of the words, after the backward pass.
    """

    def seconds(begins: list[float]) -> float:
        return median(end - begin for begin, end in pairwise(begins[-MEASURED - 1 :]))

    found = {}
    alone = seconds(run(max(sizes), train_slowly, 1)[0])
    for size in sizes:
        begins, sent = run(size, train_slowly, size, rate=RATE)
        weights = 4 * SMALL["dim"] ** 2 + 2 * SMALL["dim"] * SMALL["hidden_dim"]
        layer = 2 * (size - 1) / size * 2 * weights / RATE  # of two bytes, there and back
        free, ready = 0.0, STEP * SLOWER / 3
        for _ in range(LAYERS):
            ready += STEP * SLOWER * 2 / 3 / LAYERS
            free = max(free, ready) + layer
        free += sent / len(begins) / RATE - LAYERS * layer
        each = {"measured": alone / seconds(begins), "modeled": STEP * SLOWER / free}
        found[str(size)] = {name: round(value, 3) for name, value in each.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--efficiency", action="store_true")
    if not parser.parse_args().efficiency:
        finish([], one_way_delays={str(size): measure_delays(size) for size in (2, 4, 8, 16)})
    found = measure_efficiency((4, 16))
    apart = max(abs(each["measured"] / each["modeled"] - 1) for each in found.values())
    finish(
        ["within 5 % of the model"] if apart > 0.05 else [],
        efficiency=found,
        step_s=STEP,
        gbit=GBIT,
    )


if __name__ == "__main__":
    main()
