"""Results of `--tune placement`, kept on the head node, where later jobs from any machine find them.

A result is valid only for what it was measured with: :class:`TuningKey`.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from infra.errors import UsageError
from infra.files import parse_as, read_text
from jobs.train.request import TrainRequest, local_model
from jobs.worker.training.options import TrainOptions
from provision.facts import HostFacts
from provision.host import Host
from provision.stacks.stack import Stack

FILE = "/home/ubuntu/.spr-cluster-tuned.json"


@dataclass(frozen=True)
class TuningKey:
    """The conditions of a result. :func:`describe_nodes` returns ``nodes``."""

    stack: str
    backend: str
    dtype: str
    ipex: bool
    model: str
    max_length: int
    nodes: str
    task: str = "squad"


@dataclass(frozen=True)
class TuningResult:
    """The fastest trial; ``ccl_workers`` is 0 without oneCCL, ``when`` is ISO 8601 in UTC.

    ``batch_size`` is ``None`` unless several were compared.
    """

    key: TuningKey
    nproc_per_node: PositiveInt
    ccl_workers: NonNegativeInt
    batch_size: Annotated[int, Field(ge=1, le=4096)] | None
    samples_per_second: float
    when: str

    @property
    def day(self) -> str:
        return self.when[:10]


def tuning_key(stack: Stack, request: TrainRequest, facts: Iterable[HostFacts]) -> TuningKey:
    """Return a result's conditions: the same stack, model, and arithmetic on the same nodes."""
    options = request.options
    return TuningKey(
        stack=stack.name,
        backend=stack.choose_backend(options.backend),
        dtype=options.dtype,
        ipex=stack.choose_ipex(options.ipex),
        model=_model_identity(options),
        max_length=getattr(options, "max_length", 0),
        nodes=describe_nodes(facts),
        task=options.task,
    )


def _model_identity(options: TrainOptions) -> str:
    """Return a name on the hub, or a digest of a local model's configuration, which decides its speed."""
    folder = local_model(options)
    if folder is None:
        student = getattr(options, "student_layers", 0), getattr(options, "teacher", "")
        return options.model_name or "{} layers of {}".format(*student)
    digest = hashlib.sha256(read_text(folder / "config.json").encode()).hexdigest()
    return f"config.json {digest[:16]}"


def describe_nodes(facts: Iterable[HostFacts]) -> str:
    """Return the hardware that placement depends on, such as ``2 x Xeon, 32 cores in 1``."""
    kinds = Counter(
        f"{fact.model}, {len(fact.physical_cores)} cores in {len(fact.numa_nodes)}"
        for fact in facts
    )
    return "; ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items()))


def read_tuned(head: Host, key: TuningKey) -> TuningResult | None:
    """Return the result for exactly this key, if there is one."""
    return next((result for result in _read_all(head) if result.key == key), None)


def save_tuned(head: Host, new: TuningResult) -> None:
    """Add a result to the head's file, and remove those for other nodes."""
    others = (r for r in _read_all(head) if r.key != new.key and r.key.nodes == new.key.nodes)
    text = json.dumps([asdict(result) for result in (*others, new)], indent=1) + "\n"
    head.put(text.encode(), FILE, 0o644)


def _read_all(head: Host) -> tuple[TuningResult, ...]:
    """Return the file's results; none if it can't be read, because a study can measure again."""
    text = head.run(f"cat {FILE} 2>/dev/null || true").stdout
    with suppress(UsageError):
        return parse_as(tuple[TuningResult, ...], text, FILE)
    return ()
