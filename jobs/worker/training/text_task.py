"""Tasks whose model reads texts: what they share. Imports that need torch are in methods, as in a task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from ..runtime.errors import ModelError
from .options import NO_CACHE, SCRATCH, TextOptions
from .task import Loaded, Task

if TYPE_CHECKING:
    from ..data.texts import TextSamples
    from ..data.tokens import Column, Tokens
    from .state import TrainContext

OwnText = TypeVar("OwnText", bound=TextOptions)


class Row(NamedTuple):
    """A row to predict for, and where it stands, such as ``line 3``."""

    place: str
    values: Any


class TextTask(Task[OwnText]):
    """A task of a model that reads texts."""

    head: ClassVar[str]
    """What transformers calls the task, such as "SequenceClassification"."""

    def download(self) -> None:
        from .model import load_pretrained  # noqa: PLC0415

        name = self.options.model
        if name != SCRATCH and not Path(name).is_dir():
            load_pretrained(name, self.head)

    @classmethod
    def predict(cls, loaded: Loaded, rows: Sequence[Row]) -> list[dict[str, Any]]:  # noqa: ARG003
        """Return a trained model's prediction for each row. Raises :class:`DatasetError` with its place."""
        raise ModelError(f"`predict` can't use models of `train {cls.name}`")

    def encode_samples(
        self,
        context: TrainContext,
        loaded: Loaded,
        texts: Sequence[Sequence[str]],
        targets: Sequence[Any],
        *,
        offsets: bool = False,
    ) -> TextSamples:
        """Return samples of one text each, or of two: ``texts`` has one column, or two.

        What is beyond ``max_length`` is cut off, and counted in a note.
        """
        from ..data.texts import TextSamples  # noqa: PLC0415
        from ..data.tokens import Column, read_template  # noqa: PLC0415

        columns = [Column(list(each), offsets) for each in texts]
        tokens = self.encode(context, loaded, columns)
        template = read_template(loaded.tokenizer, pair=len(texts) == 2)
        samples = TextSamples(tokens, template, targets, self.options.max_length)
        counts = zip(*(each.counts for each in tokens), strict=True)
        cut = sum(sum(each) > samples.room for each in counts)
        if cut:
            text = f"{cut} of {len(samples)} samples are longer than {samples.max_length} tokens and are cut"
            context.events.note(f"{text}; --max-length keeps more")
        return samples

    def encode(
        self, context: TrainContext, loaded: Loaded, columns: Sequence[Column]
    ) -> list[Tokens]:
        """Return each column's tokens, made by all ranks together or from the nodes' caches."""
        from ..data.token_cache import TokenCache, encode_together  # noqa: PLC0415

        name = self.options.token_cache
        cache = None if name == NO_CACHE else TokenCache(name)
        note = context.events.note
        return encode_together(context.ranks, columns, loaded.tokenizer, cache, note)
