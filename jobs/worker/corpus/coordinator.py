"""Which rows are predicted next, and what is done: the side of rank 0, or of a process that does all.

Nobody counts a file's rows before: ranks take shards of it until one of them meets its end. What is done is
known from the names of the output's files, ``RUN-FILE-FIRST-READ-ROWS.parquet``: digests of model and options
and of the input file, the shard's first row, and how many rows were read and written.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from ..data.records import ALL_BAD
from ..data.table import Table
from ..runtime.errors import DatasetError
from ..runtime.events import name_files
from ..runtime.output import save_json
from ..tasks import find_task
from ..training.options import EXPORTED, is_exported, is_url
from ..training.text_task import TextTask
from .files import MANIFEST, Output, digest_files, digest_of, list_sources
from .options import FORMATS, PredictOptions, Shard, Source
from .shards import Predictor, choose_columns, is_added, look_at, trained_columns
from .writers import merge_parts, part_suffix

INPUTS = Path("inputs")
"""In a job's folder: local copies of files in S3."""
KEPT = Path("kept")
"""In a job's folder on a node: its predictions that rank 0's node has as well, and may be lost with."""
REPORT_SECONDS = 5.0
_VERSION = 1  # of the digest below: with another, a half-done folder is predicted again
_PART = re.compile(r"([0-9a-f]{12}-[0-9a-f]{12})-(\d{12})-(\d+)-(\d+)\.(parquet|jsonl)")

Values = dict[str, Any]


class Part(NamedTuple):
    """A shard that is done: its file, "" if no row could be used, and numbers of rows."""

    name: str
    read: int
    rows: int


@dataclass
class Progress:
    """How far a file is: ``first`` is the row after the shards that are taken."""

    source: Source
    known: str
    """How the names of its output begin."""
    columns: Sequence[str]
    """Those of the corpus."""
    parts: dict[int, Part] = field(default_factory=dict)
    first: int = 0
    has_ended: bool = False
    expected: int = 0

    def take(self, count: int) -> Shard | None:
        """Return the next shard that is not done; ``None`` at the file's end."""
        while not self.has_ended and (done := self.parts.get(self.first)):
            self.has_ended, self.first = done.read < count, self.first + count
        if self.has_ended:
            return None
        first, self.first = self.first, self.first + count
        return Shard(self.source, first, count, f"{self.known}-{first:012d}", self.columns)


def run_digest(options: PredictOptions, count: int, added: Sequence[str]) -> str:
    """Return twelve digits for all that decides on the predictions for a row.

    Columns that have the names of ``added`` ones rename these.
    """
    folders = [Path(each) for each in (options.model, options.base) if each and Path(each).is_dir()]
    files = sorted(path for each in folders for path in each.rglob("*") if path.is_file())
    model = digest_files(path for path in files if path.suffix != ".md")
    own = (dict(options.columns), dict(options.settings), is_exported(options.model), count)
    return digest_of([_VERSION, model, *own, *added])


@dataclass
class Coordinator:
    """A corpus and its output. Methods in ``SERVED`` take and return what JSON can hold.

    Only one thread may use it.
    """

    SERVED: ClassVar[Any] = ("ask", "tell", "is_over", "join", "offer")

    options: PredictOptions
    note: Callable[[str], None]
    report: Callable[[str], None]
    """Receives how far the job is."""
    ranks: int = 1
    kept: Path | None = None
    """The folder that this node had in an earlier attempt, when it was not that of rank 0."""
    hosts: dict[int, str] = field(default_factory=dict)
    _last: dict[int, int] = field(default_factory=dict)
    """The file of which a rank has taken rows last: it has read it up to there."""
    _running: set[tuple[int, int]] = field(default_factory=set)
    _dismissed: int = 0
    _problem: str = ""
    _begin: float = field(default_factory=time.monotonic)
    _first: float = 0.0
    """When the first shard was begun, with the model loaded."""
    _told: float = field(default_factory=time.monotonic)
    _now_rows: int = 0
    """Rows that were read since the beginning."""
    _core_seconds: float = 0.0
    _cut: int = 0

    def __post_init__(self) -> None:
        """Raise :class:`WorkerError` for a corpus or an output that can't be used."""
        options, task = self.options, find_task(self.options.model)
        self.output = Output(options.parts if self.is_file else options.output)
        self.output.require_writable()
        sources = list_sources(options.data)
        # Of a corpus in S3, only the first file: the others are downloaded when they are predicted.
        looked = sources[:1] if is_url(options.data) else sources
        found = [look_at(task, each, INPUTS) for each in looked]
        self.task, self.count = task.name, found[0].shard_rows
        self._note_columns(task, sources[0], found[0].columns)
        columns = tuple(dict.fromkeys(name for each in found for name in each.columns))
        added = sorted(each for each in columns if is_added(task, each))
        self._run = run_digest(options, self.count, added)
        self._files = [Progress(each, f"{self._run}-{each.digest}", columns) for each in sources]
        self._by_name = {each.known: each for each in self._files}
        self._resume()

    @property
    def is_file(self) -> bool:
        """Whether the output is one file."""
        return not is_url(self.options.output) and self.options.output.lower().endswith(FORMATS)

    def _note_columns(
        self, task: type[TextTask[Any]], source: Source, columns: tuple[str, ...]
    ) -> None:
        """Name a column that is read instead of that of the training. Raises :class:`DatasetError`."""
        asked, trained = self.options.columns, trained_columns(self.options.model)
        if not trained or not columns:
            return
        table = Table(name_files(source.name), columns, [])
        for name, column in choose_columns(task, table, asked, trained).items():
            known = trained.get(name, column)
            if name not in asked and column.strip() != known.strip():
                self.note(
                    f"{table.source}: reading column {column!r}, not {known!r} as in training"
                )

    def _resume(self) -> None:
        strange, place = list[str](), Path(self.output.place)
        if self.kept and self.kept.is_dir() and not is_url(self.output.place):
            place.mkdir(parents=True, exist_ok=True)
            for path in self.kept.glob("[!.]*"):
                path.replace(place / path.name)
        done = Path(self.options.done)
        there = json.loads(done.read_text(encoding="utf-8")) if self.options.done else []
        for name in (*there, *self.output.names()):
            if _PART.fullmatch(name) and not self._learn(name):
                strange.append(name)
        if strange and self.is_file:
            for name in strange:
                (place / name).unlink()
        elif strange:
            raise DatasetError(
                f"--output {self.options.output}: has other predictions, such as {strange[0]}: those of "
                "another model, other options, or data that have changed",
                hint="name another folder, or remove them",
            )
        if count := sum(len(each.parts) for each in self._files):
            self.note(f"rows done already: {self.rows:,} (shards: {count:,})")

    def _learn(self, name: str) -> bool:
        """Take a shard's file for done; return whether it is one of these predictions."""
        match = _PART.fullmatch(name)
        if not match or match[1] not in self._by_name:
            return False
        if not name.endswith(part_suffix(self.options.output)):
            return False
        part = Part(name, int(match[3]), int(match[4]))
        self._by_name[match[1]].parts[int(match[2])] = part
        return True

    def _parts(self) -> Iterator[Part]:
        return (part for each in self._files for _, part in sorted(each.parts.items()))

    @property
    def rows(self) -> int:
        """The rows with predictions so far."""
        return sum(part.rows for part in self._parts())

    def join(self, rank: int, host: str) -> tuple[str, str]:
        """Take a rank's host; return the node with this folder or URL of the output, "" for its own."""
        self.hosts[rank] = host
        here = socket.gethostname()
        return "" if host == here else os.environ.get("SLURMD_NODENAME", here), self.output.place

    def offer(self, rank: int, names: Sequence[str]) -> list[str]:
        """Return the files that the output lacks, of those that a rank's node kept; the rank sends them."""
        have = {part.name for part in self._parts()}
        lacking = [name for name in names if name not in have and self._learn(name)]
        if lacking:
            self.note(f"shards done already, from {self.hosts[rank]}: {len(lacking):,}")
        return lacking

    def ask(self, rank: int) -> Values | None:
        """Return the next shard as JSON; ``None`` if nothing is left.

        A rank stays with the file that it reads, or opens a new one, or helps with the one with most left.
        """
        last = self._last.get(rank, -1)

        def rate(number: int) -> tuple[bool, bool, int, int]:
            each = self._files[number]
            left = (each.expected or each.source.size) - each.first
            return number != last, bool(each.first), -left if each.first else 0, number

        for number in sorted(range(len(self._files)), key=rate):
            if shard := self._files[number].take(self.count):
                self._last[rank] = number
                self._running.add((number, shard.first))
                return {"number": number, **asdict(shard)}
        self._dismissed += 1
        return None

    def is_over(self) -> bool:
        """Return whether every rank knows that nothing is left, and has reported what it did."""
        return self._dismissed >= self.ranks and not self._running

    def tell(self, number: int, first: int, found: Mapping[str, Any]) -> None:
        """Take what was done of a shard; its rows are in the output already."""
        each = self._files[number]
        self._running.discard((number, first))
        is_first = not self._now_rows
        if found["read"]:
            each.parts[first] = Part(found["name"], found["read"], found["rows"])
        if found["read"] < self.count:
            each.has_ended = True
        each.expected = found["expected"]
        self._problem = self._problem or found["problem"]
        self._now_rows += found["read"]
        self._core_seconds += found["core_seconds"]
        self._cut += found["cut"]
        now = time.monotonic()
        if is_first:
            self._first = now - found["seconds"]
        if is_first and found["read"]:
            speed = found["read"] / found["seconds"] * self.ranks
            usd = self._price(speed)
            price = f", ${usd:.2f} per million rows" if usd else ""
            self.note(f"first rows: {found['read']:,}, {speed:,.1f} rows/s{price}")
        if now - self._told >= REPORT_SECONDS:
            self._told = now
            self.report(self._describe(now))

    def _price(self, speed: float) -> float:
        """Return US dollars per million rows, 0 if nothing is paid."""
        return self.options.usd_per_hour / 3600 / speed * 1e6

    def _describe(self, now: float) -> str:
        read, bytes_, known = 0, 0, 0
        for each in self._files:
            own = sum(part.read for part in each.parts.values())
            read += own
            if each.expected:
                bytes_ += each.source.size
                known += own if each.has_ended else max(own, each.expected)
        total = known / max(1, bytes_) * sum(each.source.size for each in self._files)
        speed = max(1, self._now_rows) / (now - self._first)
        left = max(0.0, total - read) / speed
        return f"{read:,} of about {total:,.0f} rows, {speed:,.1f} rows/s, {left:.0f} s left"

    def finish(self) -> Values:
        """Write one file of all shards, or the manifest beside them; return the job's results.

        Raises :class:`DatasetError` if no row could be used.
        """
        parts, seconds = list(self._parts()), max(time.monotonic() - self._begin, 1e-9)
        rows, skipped = self.rows, sum(each.read - each.rows for each in parts)
        if not rows:
            no_rows = self._problem or f"{self.options.data}: has no rows"
            raise DatasetError(no_rows, hint=ALL_BAD if self._problem else None)
        if self._cut:
            self.note(f"{self._cut:,} rows have more tokens than the model reads, and were cut")
        speed = self._now_rows / seconds
        records = f"skipped {skipped} bad record{'s' * (skipped > 1)}"
        first = f", the first: {self._problem}" if self._problem else ""
        found: Values = {
            "task": self.task,
            "rows": rows,
            "skipped": skipped,
            "skip_note": name_files(records + first) if skipped else None,
            "rows_per_second": round(speed, 1),
            "rows_now": self._now_rows,
            "seconds": {"total": round(seconds, 3)},
            "core_seconds": round(self._core_seconds, 3),
            "usd_per_million_rows": (round(self._price(speed), 4) or None) if speed else None,
        }
        if self.is_file:
            self.report(f"writing {rows:,} rows")
            names = [each.name for each in parts if each.name]
            place = Path(self.output.place)
            merge_parts([place / name for name in names], Path(self.options.output))
            shutil.rmtree(place)
        else:
            with self.output.writing(MANIFEST, INPUTS) as target:
                save_json(target, self._manifest(found))
        return found

    def _manifest(self, found: Mapping[str, Any]) -> Values:
        options = self.options
        asked = {name: getattr(options, name) for name in ("columns", "settings")}
        files = [
            {
                "data": name_files(each.source.name),
                "version": each.source.version,
                "rows": sum(part.rows for part in each.parts.values()),
                "skipped": sum(part.read - part.rows for part in each.parts.values()),
                "files": [part.name for _, part in sorted(each.parts.items()) if part.name],
            }
            for each in self._files
        ]
        model = {"digest": self._run, "openvino": EXPORTED if is_exported(options.model) else None}
        return {**found, "model": model, "options": asked, "shard_rows": self.count, "files": files}


def predict_corpus(options: PredictOptions, note: Callable[[str], None]) -> Values:
    """Predict in this process. Raises :class:`..runtime.errors.WorkerError`."""
    coordinator = Coordinator(options, note, note)
    predictor: Predictor | None = None
    while shard := coordinator.ask(0):
        predictor = predictor or Predictor(options, INPUTS)
        found = predictor.predict(parse_shard(shard), coordinator.output)
        coordinator.tell(shard["number"], shard["first"], found)
    return coordinator.finish()


def parse_shard(content: Mapping[str, Any]) -> Shard:
    """Return the shard of which :meth:`Coordinator.ask` made JSON."""
    rest = {name: content[name] for name in ("first", "count", "name", "columns")}
    return Shard(Source(**content["source"]), **rest)
