"""A teacher: a trained model whose outputs a student learns, and whose layers it may have.

The laptop imports this for the options, without torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import chain
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from ..data.readers import is_small, read_table
from ..data.text_files import READERS
from ..runtime.errors import DatasetError, ModelError, first_line
from .options import EncoderOptions, Range, TextOptions, option
from .task import Data, Loaded
from .text_task import RowOptions, TableTask

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..runtime.ranks import Ranks
    from .batches import Taught
    from .state import TrainContext

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class TeacherOptions(RowOptions, EncoderOptions):
    """Distillation. Raises ``ValueError`` for options that don't fit together."""

    teacher: str | None = option(
        None,
        "also learn the outputs of a trained model, in a folder or on the hub, or those in a file with "
        "`scores` for each row of --data",
        metavar="NAME|PATH",
    )
    distill_alpha: float = option(
        0.5,
        "share of the data's own labels in the loss; the teacher has the rest",
        within=Range(0, 1),
        needs="--teacher",
    )
    student_layers: int | None = option(
        None,
        "train the teacher with N of its layers, evenly chosen, instead of --model",
        kind=int,
        within=Range(1, 1000),
        metavar="N",
        needs="--teacher",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.student_layers and self.model != TextOptions.model:
            raise ValueError("--student-layers: the student is made of --teacher; omit --model")
        if self.teacher_file and self.student_layers:
            raise ValueError("--student-layers needs a model as --teacher, not a file")
        if self.teacher_file and self.eval_fraction:
            raise ValueError("--teacher with a file has a row for each of --data: use --eval")

    @property
    def teacher_file(self) -> Path | None:
        """The file with the teacher's outputs, if it is no model."""
        name = self.teacher or ""
        return Path(name) if {*Path(name).suffixes[-2:]} & {*READERS} else None

    @property
    def model_name(self) -> str | None:
        return None if self.student_layers else self.model


Own = TypeVar("Own", bound=TeacherOptions)


class TaughtTask(TableTask[Own]):
    """A task whose model may learn from a teacher, with ``width`` outputs for a text or pair."""

    @property
    def width(self) -> int:
        return 1

    def download(self) -> None:
        super().download()
        name = self.options.teacher
        if name and self.options.teacher_file is None and not Path(name).expanduser().is_dir():
            self.open_teacher()

    def check_data(self, data: Data) -> None:
        super().check_data(data)
        file = self.options.teacher_file
        if file and is_small(str(file)):  # on the laptop, one in S3 is not
            self.read_outputs(data.train)

    def read_outputs(self, records: Sequence[Any]) -> list[list[float]]:
        """Return the teacher's outputs in its file, if it is one. Raises :class:`DatasetError`."""
        file = self.options.teacher_file
        if file is None:
            return []
        table, found = read_table(str(file)), list[list[float]]()
        if len(table.rows) != len(records):
            raise DatasetError(f"{file}: has {len(table.rows)} rows, and --data {len(records)}")
        for number, (row, record) in enumerate(zip(table.rows, records, strict=True)):
            try:
                found.append([float(each) for each in self.pick_outputs(row, record)])
                if not all(map(isfinite, found[-1])):
                    raise ValueError(f"{found[-1]}")
            except (KeyError, TypeError, ValueError) as error:
                raise DatasetError(
                    f"{table.place(number)}: has no usable `scores`: {first_line(error)}"
                ) from None
        return found

    def pick_outputs(self, row: Mapping[str, Any], record: Any) -> Sequence[Any]:
        """Return the outputs in a row of the teacher's file. Raises ``KeyError`` or ``ValueError``."""
        raise NotImplementedError

    def open_teacher(self, context: TrainContext | None = None) -> Loaded:
        """Return the teacher; without a context, to check it. Raises :class:`ModelError`."""
        from .model import load_pretrained, require_length, settle_padding  # noqa: PLC0415

        name = str(self.options.teacher)
        loaded = load_pretrained(name, self.head)
        if loaded.new_weights:
            missing = ", ".join(loaded.new_weights)
            raise ModelError(f"--teacher {name} was not trained for this: it has no {missing}")
        settle_padding(loaded)
        require_length(replace(self.options, model=name, student_layers=None), loaded)
        return loaded

    def compute_outputs(self, context: TrainContext, teacher: Loaded, samples: Any) -> NDArray[Any]:
        """Return a model's outputs for samples, shape (samples or their parts, outputs), on every rank."""
        from .evaluation import compute_logits  # noqa: PLC0415

        return compute_logits(context.ranks, teacher, samples, context.autocast())


def ask_teacher(task: Any, context: TrainContext, records: Sequence[Any]) -> Taught | None:
    """Return the teacher's outputs for the records, the same on every rank; None without a teacher."""
    import numpy as np  # noqa: PLC0415

    from ..data.token_cache import compute_once  # noqa: PLC0415
    from .batches import Taught  # noqa: PLC0415

    if getattr(task.options, "teacher", None) is None:
        return None
    given = [*chain.from_iterable(task.read_outputs(records))]
    if given:
        outputs = np.array(given, np.float32).reshape(-1, task.width)
        return Taught(outputs, blake2b(outputs.tobytes(), digest_size=16).hexdigest())
    with context.phase("teacher"):
        teacher = task.open_teacher(context)
        samples = task.prepare(context, teacher, records)
        ground = "\0".join([digest_weights(teacher.model), *getattr(task, "classes", ())])
        key = f"{ground} {settings_of(teacher.model)} {samples.digest()} {context.precision.dtype}"

        def compute() -> NDArray[Any]:
            found: NDArray[Any] = task.compute_outputs(context, teacher, samples)
            return found.astype(np.float32)

        cache, note = task.open_cache(), context.events.note
        return Taught(compute_once(context.ranks, cache, key, compute, note), ground)


def settings_of(model: Any) -> str:
    """Return what a model's outputs depend on besides its weights: its configuration and pooling."""
    own = model.config.to_diff_dict()
    known = {name: own[name] for name in own.keys() - {"_name_or_path", "transformers_version"}}
    return json.dumps([getattr(model, "pooling", None), known], sort_keys=True, default=str)


def digest_weights(model: Any) -> str:
    """Return a digest of all weights."""
    found = blake2b(digest_size=16)
    for name, each in model.state_dict().items():
        found.update(f"{name} {tuple(each.shape)} {each.dtype};".encode())
        found.update(each.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def load_student(
    options: TeacherOptions,
    head: str,
    texts: Iterable[str],
    ranks: Ranks,
    settings: Mapping[str, Any] = _NOTHING,
) -> Loaded:
    """Return the model to train: that of the options, or the teacher with some of its layers."""
    from .model import load_model  # noqa: PLC0415

    source = options
    if options.student_layers is not None:
        source = replace(options, model=str(options.teacher), student_layers=None)
    loaded = load_model(source, head, texts, ranks, settings)
    if options.student_layers is not None:
        keep_layers(loaded.model, options.student_layers)
    # Saved with the tokenizer, so that `predict` cuts texts as training did.
    loaded.tokenizer.model_max_length = options.max_length
    return loaded


def keep_layers(model: Any, count: int) -> None:
    """Leave evenly chosen layers, the first among them: of twelve, four are 0, 3, 6, and 9.

    Raises :class:`ModelError` for a model with fewer, and for one that could not be loaded after training.
    """
    from torch.nn import ModuleList  # noqa: PLC0415

    config = model.config
    total = int(getattr(config, "num_hidden_layers", 0))
    lists = [
        each for each in model.modules() if isinstance(each, ModuleList) and len(each) == total
    ]
    if len(lists) != 1 or count > total:
        found = f"{total} layers" if len(lists) == 1 else "no single list of layers"
        raise ModelError(f"--student-layers {count}: the teacher has {found}")
    # The first layer of some models, such as ModernBERT, has other weights than the others.
    kept = [number * total // count for number in range(count)]
    (layers,) = lists
    chosen = [layers[number] for number in kept]
    del layers[:]
    layers.extend(chosen)
    for number, layer in enumerate(layers):
        for part in layer.modules():
            if hasattr(part, "layer_idx"):  # a decoder's place in the cache of keys and values
                setattr(part, "layer_idx", number)  # noqa: B010 - torch types attributes as tensors
    config.num_hidden_layers = count
    # Such as layer_types, Longformer's attention_window, and the layers without positions of SmolLM3.
    by_layer = [n for n, v in vars(config).items() if isinstance(v, list) and len(v) == total]
    for name in by_layer:
        setattr(config, name, [getattr(config, name)[number] for number in kept])
    _require_loadable(model, count)


def _require_loadable(model: Any, count: int) -> None:
    """Raise :class:`ModelError` if the configuration does not fit, such as ESM's, which counts all heads."""
    import torch  # noqa: PLC0415

    config = model.config
    try:
        with torch.device("meta"):
            again = type(model)(type(config).from_dict(config.to_dict()))
        again.load_state_dict(model.state_dict(), assign=True)
    except Exception as error:  # of the library's many types
        why = str(error).splitlines()[-1].strip()
        raise ModelError(
            f"--student-layers {count}: the student could not be loaded: {why}",
            hint="use a smaller model as --model",
        ) from error
