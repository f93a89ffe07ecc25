"""Efficiency of training on several nodes over links of a given speed, at the pace that AMX should have.

python -m benchmarks.links [--nodes 4] [--gbit 10 25] [--rounds 5]     (root: it makes network namespaces)
python -m benchmarks.links --compute --nodes 2 --ppn 1 --dilate 32     (one core per rank)

Each rank is a process, each node a network namespace, and the kernel limits what a node sends. The product's
own code sums gradients of DistilBERT's shape over gloo. Computing is REPLACED BY SLEEPING: this machine
can't compute for that many nodes. A step takes as long as benchmarks.overheads projects for a node with AMX
(--features-per-second), and everything is --dilate times slower than it would be, links included, so that
what this machine's few cores do for all ranks does not count. That also leaves out the cores' time for the
exchange on a real node, so that is printed: CPU seconds per rank and step, not dilated. Latency is that of
this machine, which is none.

With --compute, each rank multiplies matrices instead, in as many products as its core does alone in that
time, and its other threads share the core. With --dilate as the number of cores that a rank has on a real
node, the exchange takes the same share of the rank's CPU time as there.

Efficiency is the time of a step without exchange by that of one with it, on the same ranks, in turn. `ring`
is one ring of all ranks and compiled layers as a whole; `fast` is what the product does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import finish
from benchmarks.namespaces import connected_nodes, run_ranks
from benchmarks.squad_speed import preload
from infra.local.machines.links import LinkLimits
from jobs.worker.fast.communication import Replica, choose_all_reduce, sum_in_ring
from jobs.worker.runtime.ranks import join

LIMITS = {10.0: 0.90, 25.0: 0.95}
"""The efficiency to be reached on four nodes."""
WAYS = ("ring", "fast")
WIDTH, VOCABULARY, LAYERS = 768, 30522, 6
FORWARD, BACKWARD, UPDATE = 0.30, 0.61, 0.09
"""Shares of a step: a backward pass has two products for each of the forward pass; see overheads."""
ATTENTION = 0.4
"""Share of a layer's backward pass that comes last."""
WORDS, POOL = 1814, 8500
"""Distinct words in 32 features of the data, and from how many each rank draws its own: together, eight ranks
have about 7,250, to which the growth from 32 to 128 features leads."""


def main() -> None:
    """Take steps both ways at each speed; print efficiencies."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--ppn", type=int, default=2, help="ranks per node")
    parser.add_argument("--gbit", type=float, nargs="+", default=list(LIMITS), help="per second")
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--features-per-second", type=float, default=305, help="of a node")
    parser.add_argument("--dilate", type=float, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--compute", action="store_true", help="compute instead of sleeping")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        _take_steps(args)
        return
    found = {f"{gbit:g}": _measure(args, gbit) for gbit in args.gbit}
    missed = [
        f"{limit} at {gbit:g} Gbit/s"
        for gbit, limit in LIMITS.items()
        if f"{gbit:g}" in found and found[f"{gbit:g}"].get("fast", {}).get("efficiency", 1) < limit
    ]
    names = ("nodes", "ppn", "batch_size", "features_per_second", "dilate", "rounds", "compute")
    settings = {name: getattr(args, name) for name in names}
    finish(missed, benchmark="links", by_gbit_s=found, limits=LIMITS, **settings)


def _measure(args: argparse.Namespace, gbit: float) -> dict[str, Any]:
    with connected_nodes(args.nodes, LinkLimits(gbit / args.dilate)) as nodes:
        argv = ["benchmarks.links", *sys.argv[1:]]
        ranks = run_ranks(nodes, argv, preload(), ppn=args.ppn)
    return {way: _summarize([rank[way] for rank in ranks]) for way in args.ways}


def _summarize(ranks: list[list[dict[str, float]]]) -> dict[str, float]:
    """Return medians over rounds; a step takes as long as that of its slowest rank."""
    rounds = list(zip(*ranks, strict=True))
    pairs = [[max(each[name] for each in one) for name in ("alone", "together")] for one in rounds]
    cpu = [each["cpu"] for one in rounds for each in one]
    return {
        "efficiency": round(statistics.median(alone / together for alone, together in pairs), 4),
        "exchange_cpu_s_per_rank": round(statistics.median(cpu), 3),
        "mb_per_rank": round(ranks[0][0]["mb"], 1),
    }


def _take_steps(args: argparse.Namespace) -> None:
    """Be one rank: take each round's steps both ways, and print their times."""
    import torch

    compute = args.batch_size * args.ppn / args.features_per_second * args.dilate
    found: dict[str, list[dict[str, float]]] = {way: [] for way in args.ways}
    with join("gloo") as ranks:
        work = _pinned_products(ranks) if args.compute else time.sleep
        ids = torch.Generator().manual_seed(ranks.rank)
        for way, figures in found.items():
            all_reduce = sum_in_ring if way == "ring" else choose_all_reduce(ranks)
            model = paced_model(compute, work, in_parts=way == "fast")
            replica = Replica(model, torch.bfloat16, ranks.control, all_reduce)
            for _ in range(args.rounds + 1):
                words = torch.randperm(POOL, generator=ids)[:WORDS][None]
                figures.append(_take_pair(ranks, replica, words, lambda: work(UPDATE * compute)))
            # DistributedDataParallel arranges its buckets after its first step.
            del figures[0], replica, model
    print(json.dumps(found), flush=True)


def _pinned_products(ranks: Any) -> Callable[[float], None]:
    """Pin this rank to a core.

    Return a function that computes for as long as the given seconds would take on that core alone.
    """
    import torch

    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < ranks.size:
        raise SystemExit(f"--compute needs a core per rank: {ranks.size}")
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), {cores[ranks.rank]})
    torch.set_num_threads(1)
    one, other, result = (torch.randn(256, 256) for _ in range(3))

    def multiply(count: int) -> None:
        for _ in range(count):
            torch.mm(one, other, out=result)

    multiply(1000)
    begin = time.perf_counter()
    multiply(1000)
    per_second = 1000 / (time.perf_counter() - begin)
    return lambda seconds: multiply(round(seconds * per_second))


def _take_pair(
    ranks: Any, replica: Any, words: Any, update: Callable[[], None]
) -> dict[str, float]:
    """Take a step alone, and one together with the other ranks."""

    def step(exchange: bool) -> tuple[float, float]:
        ranks.gather(None)
        replica.zero_grad(set_to_none=True)
        begin, cpu = time.perf_counter(), time.process_time()
        if exchange:
            replica(words).backward()
            replica.sum_words()
        else:
            with replica.no_sync():
                replica(words).backward()
        update()
        return time.perf_counter() - begin, time.process_time() - cpu

    (alone, idle), sent = step(exchange=False), replica.sent_bytes
    together, busy = step(exchange=True)
    megabytes = (replica.sent_bytes - sent) / 1e6
    return {"alone": alone, "together": together, "cpu": busy - idle, "mb": megabytes}


def paced_model(compute_s: float, work: Callable[[float], None], *, in_parts: bool) -> Any:
    """Return a model with DistilBERT's parameters that sleeps, or does other ``work``, instead of computing.

    A compiled layer has all its gradients at once; a first layer in parts has those of attention last.
    """
    import torch
    from torch import nn

    types = {1: torch.float32, 2: torch.bfloat16}

    class Paced(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, values: Any, part: Any, *_: Any) -> Any:
            ctx.part = part
            work(part.forward_s)
            return values.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            work(ctx.part.backward_s)
            return gradient, None, *ctx.part.gradients

    class Part(nn.Module):
        """Parameters whose gradients are ready at the same time, after a share of the computing."""

        def __init__(self, share: float, *shapes: tuple[int, ...]) -> None:
            super().__init__()
            # Weights of products are in bf16, like their gradients.
            values = [torch.zeros(shape, dtype=types[len(shape)]) for shape in shapes]
            self.own = nn.ParameterList([nn.Parameter(each) for each in values])
            self.gradients = [torch.randn_like(each) for each in values]
            self.forward_s, self.backward_s = (
                compute_s * share * whole for whole in (FORWARD, BACKWARD)
            )

        def forward(self, values: Any) -> Any:
            return Paced.apply(values, self, *self.own)  # type: ignore[no-untyped-call]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(VOCABULARY, WIDTH)
            norm = ((WIDTH,), (WIDTH,))
            attention = ((WIDTH, WIDTH), (WIDTH,)) * 4 + norm
            rest = ((4 * WIDTH, WIDTH), (4 * WIDTH,), (WIDTH, 4 * WIDTH), (WIDTH,), *norm)
            own = 1 / LAYERS
            first = (
                [Part(own * ATTENTION, *attention), Part(own * (1 - ATTENTION), *rest)]
                if in_parts
                else [Part(own, *attention, *rest)]
            )
            others = [Part(own, *attention, *rest) for _ in range(LAYERS - 1)]
            places, head = Part(0, (512, WIDTH), *norm), Part(0, (2, WIDTH), (2,))
            self.parts = nn.Sequential(places, *first, *others, head)

        def get_input_embeddings(self) -> nn.Module:
            return self.words

        def forward(self, ids: Any) -> Any:
            return self.parts(self.words(ids).mean(1)).sum()

    return Model()


if __name__ == "__main__":
    main()
