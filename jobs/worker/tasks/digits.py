"""Synthetic digits: check in seconds that a cluster trains, without data or downloads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ..training.options import SCRATCH, Range, TrainOptions, option
from ..training.task import Data, Loaded, Samples, Task

if TYPE_CHECKING:
    from torch import Tensor

    from ..training.state import TrainContext

CLASSES, PIXELS, NOISE, UNSEEN = 10, 64, 0.5, 512


@dataclass(frozen=True)
class DigitsOptions(TrainOptions):
    """One training run on synthetic digits."""

    task = "digits"
    metrics: ClassVar[Mapping[str, str]] = {"accuracy": "max"}
    digits: int = option(2048, "digits to learn from", within=Range(64, 1_000_000))
    epochs: int = TrainOptions.redefine("epochs", 8)
    learning_rate: float | None = option(
        0.01, "peak learning rate", kind=float, within=Range(1e-8, 1)
    )
    compile: str = TrainOptions.redefine("compile", "off")

    @property
    def model_name(self) -> str:
        return SCRATCH


class Digits(Task[DigitsOptions]):
    """A record is a number that determines its digit and its noise; ``accuracy`` is a percentage."""

    name = "digits"
    Options = DigitsOptions
    shares = ("accuracy",)
    demo = DigitsOptions()
    help = "a small classifier on synthetic digits: no data, no download, done in seconds"

    def read(self, note: Callable[[str], None]) -> Data:
        count = self.options.digits
        return Data(range(count), "synthetic digits", range(count, count + UNSEEN), "unseen ones")

    def load(self, context: TrainContext, data: Data) -> Loaded:
        from torch import nn

        return Loaded(
            nn.Sequential(nn.Linear(PIXELS, 128), nn.ReLU(), nn.Linear(128, CLASSES)).float()
        )

    def prepare(self, context: TrainContext, loaded: Loaded, records: Sequence[int]) -> Samples:
        import torch

        from ..training.batches import SampleList

        draw = torch.Generator().manual_seed(0)
        digits = torch.randn(CLASSES, PIXELS, generator=draw)

        def sample(record: int) -> list[float]:
            noise = torch.randn(PIXELS, generator=draw.manual_seed(1 + record))
            label = record % CLASSES
            return [*(digits[label] + NOISE * noise).tolist(), label]

        return SampleList(map(sample, records))

    def collate(self, samples: Sequence[list[float]], loaded: Loaded) -> dict[str, Tensor]:
        import torch

        rows = torch.tensor(samples)
        return {"pixels": rows[:, :PIXELS], "labels": rows[:, PIXELS].long()}

    def loss(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        from torch.nn import functional

        return functional.cross_entropy(model(batch["pixels"]).float(), batch["labels"])

    def evaluate(
        self, context: TrainContext, loaded: Loaded, records: Sequence[int], samples: Any
    ) -> dict[str, Any]:
        import torch

        if not context.ranks.first:
            return {}
        batch = self.collate(samples, loaded)
        with torch.inference_mode(), context.autocast():
            found = loaded.model.eval()(batch["pixels"]).argmax(dim=1)
        right = (found == batch["labels"]).float()
        return {"predictions": found.tolist(), "accuracy": 100 * float(right.mean())}
