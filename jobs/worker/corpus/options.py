"""What `predict --data` computes, as one value for the laptop and the ranks, and the parts of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

INPUTS = ("text", "pair", "question", "context")
"""What the tasks read; ``--text-column`` names the column of ``text``."""
FORMATS = (".csv", ".jsonl", ".parquet")
"""Suffixes of an output that is one file."""


@dataclass(frozen=True)
class PredictOptions:
    """Paths or URLs, and the columns that the user named, by what they contain (:data:`INPUTS`)."""

    model: str
    data: str
    output: str
    """A file with a suffix in :data:`FORMATS`, or a folder for Parquet files."""
    columns: Mapping[str, str] = field(default_factory=dict)
    skip_bad_records: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The options of one task, by name, such as ``temperature``."""
    base: str = ""
    """The folder of the model that adapters belong to, if it is not where they say."""
    usd_per_hour: float = 0.0
    """The price of all nodes; 0 if it is unknown, or nothing is paid."""
    parts: str = "parts"
    """The folder for the shards' predictions, if the output is one file."""
    done: str = ""
    """A JSON list of the files that the output folder has on the user's machine."""


@dataclass(frozen=True)
class Source:
    """A file of the corpus; ``version`` is its digest, or its ETag in S3. ``size`` is in bytes."""

    name: str
    version: str
    size: int
    digest: str
    """Twelve digits of its place in the corpus and its version."""


@dataclass(frozen=True)
class Shard:
    """Rows of a file, from the ``first`` on, counted from 0; the file may end before ``count`` rows."""

    source: Source
    first: int
    count: int
    name: str
    """How the names of its output begin."""
    columns: Sequence[str] = ()
    """The columns of the corpus, which decide on the names of those with predictions."""
