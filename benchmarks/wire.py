"""Bytes that a rank sends per step, counted at its network interface, compared with plain DDP in fp32.

python -m benchmarks.wire [--steps 6]          (root: it makes two network namespaces)

Two ranks of one training, DistilBERT's shape with random weights, each in a network namespace of its
own with one virtual cable between them. The kernel counts what leaves each end, TCP's own overhead and
all other traffic included. `plain` is torch's DistributedDataParallel as it is, in fp32; `fast` is the
product's step. Both compute in fp32 without dropout, so that their losses can be compared.
"""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from typing import Any

from benchmarks.common import finish
from benchmarks.namespaces import CABLE, connected_nodes, run_ranks
from benchmarks.squad_data import (
    add_arguments,
    draw,
    find_encoder,
    load_features,
    load_tokenizer,
    new_model,
)
from infra.local.machines.links import LinkLimits
from jobs.worker.runtime.context import RankContext
from jobs.worker.runtime.events import Events
from jobs.worker.runtime.precision import Precision
from jobs.worker.runtime.ranks import join
from jobs.worker.tasks.squad.task import Squad, SquadOptions
from jobs.worker.training import optimizer_step as steps
from jobs.worker.training.batches import SampleList, Schedule, TrainingRun, batches
from jobs.worker.training.task import Loaded

LIMIT = 0.55
_SENT = Path("/sys/class/net") / CABLE / "statistics" / "tx_bytes"


def main() -> None:
    """Train both ways; print bytes per step and rank, their ratio, and the difference of losses."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=8, help="per rank")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--way", choices=("plain", "fast"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        _train(args)
        return
    with connected_nodes(2, LinkLimits()) as nodes:
        plain, fast = (_both_ranks(args, nodes, way) for way in ("plain", "fast"))
    ratio = max(fast["bytes"]) / max(plain["bytes"])
    apart = [abs(a - b) for a, b in zip(plain["losses"], fast["losses"], strict=True)]
    finish(
        [] if ratio <= LIMIT else [f"{LIMIT} of plain DDP's bytes"],
        benchmark="wire",
        limit_ratio=LIMIT,
        ratio=round(ratio, 4),
        mb_per_step_and_rank={
            "plain": [round(each / 1e6, 2) for each in plain["bytes"]],
            "fast": [round(each / 1e6, 2) for each in fast["bytes"]],
        },
        losses={"plain": plain["losses"], "fast": fast["losses"]},
        largest_difference_of_losses=round(max(apart), 6),
        steps=args.steps,
        batch_size=args.batch_size,
    )


def _both_ranks(args: argparse.Namespace, nodes: list[str], way: str) -> dict[str, Any]:
    argv = [f"--data={args.data}", f"--encoder={find_encoder(args.encoder)}", f"--way={way}"]
    argv += [f"--steps={args.steps}", f"--batch-size={args.batch_size}"]
    result = run_ranks(nodes, ["benchmarks.wire", *argv], {})
    return {"bytes": [each["bytes"] for each in result], "losses": result[0]["losses"]}


def _train(args: argparse.Namespace) -> None:
    """Train one rank. The first step does not count: DDP sends the weights before it."""
    import torch

    tokenizer = load_tokenizer(find_encoder(args.encoder))
    features = draw(load_features(args.data, tokenizer), args.steps + 1, 2 * args.batch_size, 1)
    model = new_model("distilbert", attention_dropout=False)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    options = SquadOptions(batch_size=args.batch_size, backend="gloo", compile="off")
    with join("gloo") as ranks:
        session = RankContext(options, ranks, Events(0, io.StringIO()), Precision("fp32", ""))
        run = TrainingRun(session, Squad(options), Loaded(model, tokenizer), SampleList(features))
        if args.way == "fast":
            model, optimizer = steps.prepare(run, args.steps)
        else:
            rate = options.highest_rate(ranks.size)
            parameters = model.train().parameters()
            optimizer = torch.optim.AdamW(parameters, rate, weight_decay=0.0, fused=True)
            model = torch.nn.parallel.DistributedDataParallel(model)
        losses, begin = [], 0
        for number, chosen in enumerate(
            batches(session, run.samples.lengths, _schedule(args.steps + 1))
        ):
            if number == 1:
                begin = int(_SENT.read_text())
            batch = run.batch(chosen)
            batch.tensors.pop("token_type_ids", None)
            losses.append(steps.take_step(run, model, optimizer, batch).loss)
        sent = int(_SENT.read_text()) - begin
    print(json.dumps({"bytes": sent / args.steps, "losses": [round(x, 6) for x in losses]}))


def _schedule(total: int) -> Schedule:
    return Schedule(total, total, 0)


if __name__ == "__main__":
    main()
