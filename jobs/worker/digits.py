"""A small classifier on synthetic digits, trained with DDP: the example of docs/add-a-job.md.

The laptop imports this file for its options, and has no torch: imports that need it are in ``train``.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .runtime.context import RankContext

CLASSES, PIXELS, NOISE = 10, 64, 0.5


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """Add the job's options; an option of type ``Path`` names a local file to send to the nodes."""
    parser.add_argument("--epochs", type=int, default=3, help="passes over the data (default: 3)")
    parser.add_argument("--batch-size", type=int, default=32, help="per rank (default: 32)")
    parser.add_argument("--samples", type=int, default=2048, help="per epoch (default: 2048)")
    parser.add_argument("--learning-rate", type=float, default=0.1, help="(default: 0.1)")


def train(context: RankContext[argparse.Namespace]) -> dict[str, Any]:
    """Train one model on all ranks and return its results; rank 0's are saved."""
    import torch  # noqa: PLC0415 - the laptop has none
    from torch.nn import functional  # noqa: PLC0415
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    options, ranks = context.options, context.ranks
    torch.manual_seed(0)
    prototypes = torch.randn(CLASSES, PIXELS)  # the same on every rank
    model = DistributedDataParallel(
        torch.nn.Sequential(
            torch.nn.Linear(PIXELS, 128), torch.nn.ReLU(), torch.nn.Linear(128, CLASSES)
        )
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate)
    draw = torch.Generator().manual_seed(1 + ranks.rank)  # other samples on each rank

    def sample() -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.randint(CLASSES, (options.batch_size,), generator=draw)
        noise = torch.randn(options.batch_size, PIXELS, generator=draw)
        return prototypes[labels] + NOISE * noise, labels

    per_epoch = max(1, options.samples // (options.batch_size * ranks.size))
    total = options.epochs * per_epoch
    curve = []
    with context.phase("train"), context.report_steps(total, per_epoch) as report:
        for step in range(1, total + 1):
            images, labels = sample()
            with context.autocast():
                loss = functional.cross_entropy(model(images).float(), labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            mean = ranks.mean(loss)
            report.step(loss=mean, samples=len(labels), lr=options.learning_rate)
            if step % per_epoch == 1 or step == total:
                curve.append((step, round(mean, 5)))
    images, labels = sample()
    accuracy = ranks.mean((model(images).argmax(1) == labels).float().mean())
    return {"accuracy": accuracy, "loss_curve": curve, "epochs": options.epochs}


if __name__ == "__main__":
    from .runtime.job import run_job
    from .runtime.process import leave

    parser = argparse.ArgumentParser(prog="digits", allow_abbrev=False)
    add_arguments(parser)
    leave(run_job(train, parser.parse_args()))
