"""A training request: checked locally, then translated into paths on the nodes."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, TypeVar

from infra.errors import SprError, UsageError
from infra.files import check_file, check_folder, read_object
from infra.s3_url import parse_s3_url
from jobs.places.record import require_own_results
from jobs.worker.data.text_files import READERS
from jobs.worker.runtime.errors import DatasetError, WorkerError
from jobs.worker.spec import JobSpec, PlacementOptions, Work
from jobs.worker.tasks import TASKS
from jobs.worker.tasks.adapters import ADAPTERS
from jobs.worker.training.options import SCRATCH, TextOptions, TrainOptions, flag, is_url
from jobs.worker.training.task import Task
from jobs.worker.training.text_task import BALANCED, TableTask
from provision.stacks.compatibility import OLDEST_PYTHON, OLDEST_TORCH, runs_tasks
from provision.stacks.stack import TORCH, Stack

MAX_DATA_BYTES = 2 << 30
"""Fifty times SQuAD. Every rank holds all data in memory, which needs several times this size."""
FILES = ("data", "eval", "teacher", "corpus")
"""Options that name a file or folder, a name on the hub, or a URL."""
_SUFFIX = re.compile(r"(\.(?:[A-Za-z]{2,7}|bz2|lz4|7z))(?:\.gz)?$")
_HUB, _PATH = re.compile(r"[\w.-]+(/[\w.-]+)?"), re.compile(r"[/.~]|.*\.[A-Za-z]{2,7}$")

OTHER_FILES = ("class_weights", "chat_template")
"""Options that name a file other than data."""
_VOCABULARIES = ("tokenizer.json", "*vocab*", "*.model", "*.tiktoken")
"""Names of files of which a tokenizer has at least one."""
_ENCODERS = re.compile(r"(?!.*decoder).*bert.*|electra|ernie|mpnet|big_bird|longformer|roformer")
"""Model types that are encoders unless their configuration says `is_decoder`."""
_AFTER_PADDING = re.compile(
    r"(xlm-)?roberta|camembert|longformer|mpnet|xmod|luke|esm|data2vec-text"
)
"""Models whose first position comes after that of the padding: RoBERTa says 514, and takes 512 tokens."""
_LM = "CausalLM"
_HEADS = {_LM: "a causal language model", "SequenceClassification": "a classification head"}

Own = TypeVar("Own", bound=TrainOptions)


@dataclass(frozen=True)
class TrainRequest:
    """A training run, with local paths; ``results`` receives its output."""

    spec: JobSpec
    results: Path
    may_tune: frozenset[str] = frozenset()
    """Values that the user left to the result of `--tune placement`: ``placement``, ``batch_size``."""
    env: tuple[str, ...] = ()
    """``NAME=VALUE`` words for the ranks."""
    hub_token: bool = False
    """Whether the login of the hub among them is this machine's, which a resumed job takes again."""

    @property
    def options(self) -> TrainOptions:
        work = self.spec.work
        options: TrainOptions = TASKS[work.task].Options(**work.options)
        return options

    @property
    def placement(self) -> PlacementOptions:
        return self.spec.resources.placement

    def change(
        self, options: TrainOptions, placement: PlacementOptions, nodes: int | None
    ) -> TrainRequest:
        """Return the request with other options, and other ranks on other nodes."""
        resources = replace(self.spec.resources, nodes=nodes, placement=placement)
        spec = replace(self.spec, work=spec_of(options).work, resources=resources)
        return replace(self, spec=spec)


def spec_of(options: TrainOptions, **parts: Any) -> JobSpec:
    """Return a training job as a value; ``parts`` are its other fields."""
    return JobSpec(Work(options.task, asdict(options)), **parts)


@contextmanager
def raising(kind: type[SprError], only: type[WorkerError] = WorkerError) -> Iterator[None]:
    """Raise what the worker's code raises as an error of this kind."""
    try:
        yield
    except only as error:
        raise kind(error.message, hint=error.hint) from None


def change_options(base: Own, given: Mapping[str, Any]) -> Own:
    """Return options changed by those that the user gave. Raises :class:`UsageError`."""
    try:
        return replace(base, **given)
    except ValueError as error:
        raise UsageError(str(error)) from None


def check_inputs(options: TrainOptions) -> str:
    """Return what is unusual about the data, or "".

    Raises :class:`UsageError` that names an unusable file and record, or an unusable model.
    """
    for name, url in s3_data(options).items():
        _check_url(options, flag(name), url)
    for path in local_data(options).values():
        if path.is_dir():
            check_folder(path)
        else:
            check_file(path, MAX_DATA_BYTES)
    teacher = local_data(options).get("teacher")
    models = {"teacher": teacher if teacher and teacher.is_dir() else None}
    for name, model in {"model": local_model(options), **models}.items():
        if model:
            what = f"{flag(name)} {getattr(options, name)}"
            _check_model(what, model)
            config = read_object(model / "config.json")
            _check_architecture(what, config, TASKS[options.task], is_teacher=name == "teacher")
            _check_sizes(what, options, config)
    with raising(UsageError, only=DatasetError):
        return TASKS[options.task](options).check()


def require_data(options: TrainOptions) -> None:
    """Raise :class:`UsageError` if a task needs data and has none."""
    task = TASKS[options.task](options)
    with raising(UsageError, only=DatasetError):
        if isinstance(task, TableTask):
            task.require_data()


def _check_model(what: str, model: Path) -> None:
    if (model / ADAPTERS).is_file():
        raise UsageError(
            f"{what}: has only adapters, which belong to another model",
            hint=f"merge them into it first: spr-cluster predict --model {model} --merge FOLDER",
        )
    if not (model / "config.json").is_file():
        raise UsageError(
            f"{what}: not a model folder, because it has no config.json",
            hint="give a folder written by save_pretrained, or the name of a model on the hub",
        )
    # transformers would make a tokenizer that knows no word.
    if not any(found for each in _VOCABULARIES for found in model.glob(each)):
        raise UsageError(
            f"{what}: has no tokenizer, only the model",
            hint="save it beside the model: tokenizer.save_pretrained(folder)",
        )
    check_folder(model)


def _check_sizes(what: str, options: TrainOptions, config: Mapping[str, Any]) -> None:
    """Refuse longer texts than a model takes, and more frozen layers than its configuration says."""

    def find(*names: str) -> int:
        numbers = [config.get(name) for name in names]
        return next((each for each in numbers if isinstance(each, int) and each > 0), 0)

    if not isinstance(options, TextOptions):
        return
    limit = find("max_position_embeddings", "n_positions")
    if _AFTER_PADDING.match(str(config.get("model_type"))):
        limit -= 1 + find("pad_token_id")
    if 0 < limit < options.max_length:
        raise UsageError(
            f"--max-length {options.max_length} is more than the {limit} tokens of {what}",
            hint="use a smaller --max-length",
        )
    layers = find("num_hidden_layers", "n_layers", "n_layer", "num_layers")
    frozen = options.freeze_layers if what.startswith("--model") else None
    if frozen and frozen.isdigit() and 0 < layers < int(frozen):
        raise UsageError(
            f"--freeze-layers {frozen} is more than the {layers} layers of {what}",
            hint=f"use --freeze-layers {layers} or less",
        )


def _check_architecture(
    what: str, config: Mapping[str, Any], task: type[Task[Any]], *, is_teacher: bool
) -> None:
    """Refuse an encoder to train a language model, and a teacher without the task's head."""
    kind, names = str(config.get("model_type")), [*map(str, config.get("architectures") or ())]
    head = getattr(task, "head", "")
    has_head = any(f"For{head}" in name or (head == _LM and "LMHead" in name) for name in names)
    if is_teacher:
        unfit, needs = names and head and not has_head, "a teacher needs"
    else:
        is_encoder = _ENCODERS.fullmatch(kind) and not config.get("is_decoder")
        unfit, needs = head == _LM and is_encoder and not has_head, f"`train {task.name}` needs"
    if unfit:
        found = ", ".join(names) or kind
        raise UsageError(f"{what}: is {found}, and {needs} {_HEADS.get(head, f'…For{head}')}")


def check_results(folder: Path, job: str = "") -> None:
    """Raise :class:`UsageError` unless a job's results can go into this folder."""
    check_writable(folder)
    require_own_results(folder, job)


def check_writable(folder: Path, option: str = "--results") -> None:
    """Raise :class:`UsageError` unless the folder can be created and written, before hours of training."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise UsageError(f"{option} {folder}: {there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"{option} {folder}: no permission to write to {there}")
    try:
        tempfile.TemporaryFile(dir=there).close()  # root has every permission, also in /proc
    except OSError as error:
        why = error.strerror or error
        raise UsageError(f"{option} {folder}: can't write to {there}: {why}") from None


def expand_home(path: str) -> Path:
    """Expand ``~`` as the shell does; an unknown user's ``~name`` stays unchanged."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - pathlib's fails for unknown users


def expand_path(name: str) -> str:
    """Expand ``~`` in a path; a URL in S3 stays unchanged."""
    return name if is_url(name) else str(expand_home(name))


def model_in(folder: Path) -> Path | None:
    """Return the folder if it is a model's, or the ``model`` in it, as in ``results/JOB``."""
    return next((each for each in (folder, folder / "model") if is_model(each)), None)


def is_model(folder: Path) -> bool:
    """Return whether a folder has a model or adapters."""
    return any((folder / name).is_file() for name in ("config.json", ADAPTERS))


def expand_model(name: str) -> str:
    """Return the model of a job's results, such as ``results/JOB``; other names stay unchanged."""
    folder = expand_home(name)
    found = model_in(folder)
    return name if name == SCRATCH or found in (None, folder) else str(found)


def local_model(options: TrainOptions) -> Path | None:
    """Return the model's local folder; ``None`` for a model on the hub or a new one.

    Raises :class:`UsageError` for a URL, and if the name is clearly a path and the folder is missing.
    """
    name = options.model_name
    if name is None or name == SCRATCH:
        return None
    if is_url(name):
        raise UsageError(
            f"--model {name}: a model can't be read from S3",
            hint="download the folder, and pass its path",
        )
    path = expand_home(name)
    if path.is_dir():
        return path
    if path.is_file() or name.startswith(("/", ".", "~")):
        raise UsageError(f"--model {name}: no such folder")
    return None


def local_data(options: TrainOptions) -> dict[str, Path]:
    """Return the local files and folders that the options name, by the option.

    Other names are data sets on the hub, or URLs.
    """
    found = {}
    for option in FILES:
        name: str | None = getattr(options, option, None)
        if name is None or is_url(name):
            continue
        path = expand_home(name)
        on_hub = _HUB.fullmatch(name) and not _PATH.match(name) and not path.exists()
        if not on_hub or not TASKS[options.task].reads_hub:
            found[option] = path
    for option in OTHER_FILES:
        name = getattr(options, option, None)
        if name not in (None, BALANCED):
            found[option] = expand_home(name)
    return found


def s3_data(options: TrainOptions) -> dict[str, str]:
    """Return the S3 URLs that the options name, by option, such as ``data``."""
    named = {option: getattr(options, option, None) or "" for option in FILES}
    return {option: name for option, name in named.items() if is_url(name)}


def refuse_s3(options: TrainOptions, where: str) -> None:
    """Raise :class:`UsageError` for data in S3, which only this tool's own clusters read."""
    for option, url in s3_data(options).items():
        raise UsageError(f"{flag(option)} {url}: not {where}, only on clusters that `up` creates")


def _check_url(options: TrainOptions, option: str, url: str) -> None:
    place = parse_s3_url(url, option)
    suffix = None if url.endswith("/") else _SUFFIX.search(place.prefix)
    is_table = TASKS[options.task].reads_hub
    if not is_table and url.endswith("/"):
        raise UsageError(f"{option} {url}: expected a file", hint=f"{options.task} reads JSON")
    if is_table and suffix and suffix[1].lower() not in READERS:
        raise UsageError(
            f"{option} {url}: its name does not say its format",
            hint=f"one of {', '.join(READERS)}, also with .gz; end a folder's URL with /",
        )


def require_able_stack(stack: Stack, command: str) -> None:
    """Raise :class:`UsageError` if the stack is too old for ``jobs/worker``."""
    if not runs_tasks(stack):
        raise UsageError(
            f"`{command}` can't run on stack {stack.name}: it needs Python {OLDEST_PYTHON} and "
            f"torch {OLDEST_TORCH} or newer, and the stack has Python {stack.python} and torch "
            f"{stack.pin(TORCH) or '0'}",
            hint="use a cluster with --stack intel or upstream",
        )


def needs_hub(options: TrainOptions) -> bool:
    """Return whether the ranks need a model or data from the hub, or send a model there."""
    model_from_hub = options.model_name not in (None, SCRATCH) and local_model(options) is None
    here = {**local_data(options), **s3_data(options)}
    named = {option for option in FILES if getattr(options, option, None)}
    no_data = hasattr(options, "data") and "data" not in here
    sends = options.push_to is not None
    return model_from_hub or sends or no_data or not named <= here.keys()


def options_on_nodes(options: Own, stack: Stack) -> Own:
    """Return the options for the nodes: paths in the job's folder, the stack's backend."""
    paths: dict[str, Any] = {name: target for name, (_, target) in _places(options).items()}
    if local_model(options):
        paths["model"] = "model"
    return replace(
        options,
        **paths,
        output="output",
        backend=stack.choose_backend(options.backend),
        ipex=stack.choose_ipex(options.ipex),
    )


def data_files(options: TrainOptions) -> dict[str, Path | bytes]:
    """Return the data and a local model, named relative to the job's folder."""
    local = [(path, there) for path, there in _places(options).values() if isinstance(path, Path)]
    files: dict[str, Path | bytes] = {
        there: path.resolve() if path.is_dir() else path for path, there in local
    }
    model = local_model(options)
    if model:
        files["model"] = model.resolve()
    return files


def name_data(options: TrainOptions) -> dict[str, str]:
    """Return what the user calls the data, by their paths in the job's folder."""
    return {target: str(source) for source, target in _places(options).values()}


def staged_data(options: TrainOptions) -> tuple[tuple[str, str], ...]:
    """Return the data that the nodes read from S3, with their places in the job's folder."""
    return tuple((url, there) for url, there in _places(options).values() if isinstance(url, str))


def _places(options: TrainOptions) -> dict[str, tuple[Path | str, str]]:
    """Return local files and folders, and URLs in S3, with their paths in the job's folder, by option."""
    found: dict[str, tuple[Path | str, str]] = {
        name: (path, place_data(name, None if path.is_dir() else path))
        for name, path in local_data(options).items()
    }
    for name, url in s3_data(options).items():
        # A folder's URL has no suffix, or ends with a slash.
        file = None if url.endswith("/") else PurePosixPath(url.partition("://")[2])
        if not TASKS[options.task].reads_hub:
            file = PurePosixPath("a.json")
        found[name] = url, place_data(name, file)
    return found


def place_data(option: str, file: PurePath | None) -> str:
    """Return the path of data in the job's folder, with the suffixes of a file."""
    suffixes = "".join(file.suffixes[-2:]).lower() if file else ""
    known = re.fullmatch(r"(\.[a-z]+)?(\.[a-z]+)", suffixes)
    last = file.suffix.lower() if file else ""
    return f"data/{'train' if option == 'data' else option}{suffixes if known else last}"
