"""One run from its options to its results: the phases, in their order."""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from ..runtime.errors import DatasetError
from ..runtime.events import Events
from ..runtime.logs import keep_log
from ..runtime.pinning import Place, take_place
from ..runtime.precision import AMX_FLAGS, choose_precision, read_cpu_flags
from ..runtime.ranks import Ranks, join
from .dataset import Question, all_texts, load_hub_dataset, read_dataset, skip_note
from .evaluation import predict
from .model import load_model
from .optimizer_step import load_ipex
from .options import TrainOptions
from .preparing import prepare_features
from .progress import Progress
from .results import RankFacts, Results, prepare_output, save_json, save_model
from .scoring import Scores, score
from .session import Session
from .speed_trial import enough_for_trial, measure
from .training_loop import train

_PACKAGES = {
    "torch": "torch",
    "transformers": "transformers",
    "ipex": "intel_extension_for_pytorch",
    "oneccl": "oneccl_bind_pt",
}


class Machine(NamedTuple):
    """What each rank tells the others about itself."""

    facts: RankFacts
    flags: frozenset[str]


class Data(NamedTuple):
    """The questions to learn and those to be asked, each with where they are from."""

    train: list[Question]
    train_source: str
    eval: list[Question]
    eval_source: str


class Phases:
    """Announces each phase, and keeps its seconds."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._begin = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._events.emit("phase", name=name)
        begin = time.perf_counter()
        yield
        self._seconds[name] = round(time.perf_counter() - begin, 3)

    def seconds(self) -> dict[str, float]:
        """Those of every finished phase, and since the beginning as ``total``."""
        return {**self._seconds, "total": round(time.perf_counter() - self._begin, 3)}

    def add(self, name: str, seconds: float) -> None:
        """Count what an interrupted run has spent on a phase before."""
        self._seconds[name] = round(self._seconds[name] + seconds, 3)
        self._begin -= seconds


def run(options: TrainOptions, events: Events) -> None:
    """Train and evaluate as this rank of the run; raises :class:`.errors.SquadError`."""
    phases = Phases(events)
    output = Path(options.output)
    if options.trial_seconds is None:
        keep_log(output, events.rank, append=options.resume)
    planned, found = take_place(os.environ)
    with join(options.backend) as ranks:
        machines = ranks.gather(_this_machine(ranks, planned, found))
        session = _open_session(options, ranks, events, machines)
        if ranks.first:
            prepare_output(output, resume=options.resume)
        with phases("load"):
            data = _load_data(options, events)
            loaded = load_model(options, all_texts(data.train), ranks)
            if loaded.new_weights:
                events.note(f"new weights, not from the model: {', '.join(loaded.new_weights)}")
        with phases("tokenize"):
            questions = enough_for_trial(options, data.train, ranks.size)
            features = prepare_features(session, loaded, questions)
            # Now, though they are asked last: what can't be asked must not show after hours.
            asked = features
            if data.eval is not data.train and options.trial_seconds is None:
                asked = prepare_features(session, loaded, data.eval)
        if options.trial_seconds is not None:
            with phases("measure"):
                speed = measure(session, loaded, features, options.trial_seconds)
            events.emit("trial", **speed._asdict())
            return
        with phases("train"):
            trained = train(session, loaded, features)
        if trained.resumed:
            phases.add("train", trained.resumed[-1][1])
        with phases("save"):
            if ranks.first:
                save_model(output, loaded)
        with phases("evaluate"):
            predictions = predict(session, loaded, data.eval, asked)
            scores = score(data.eval, predictions)
        if not ranks.first:
            return
        save_json(output / "predictions.json", predictions)
        results = _results(session, machines, data, len(features), trained, scores, phases)
        save_json(output / "results.json", results.to_dict())
        events.emit("result", **results.to_dict())


def _this_machine(ranks: Ranks, planned: Place | None, found: Place) -> Machine:
    facts = RankFacts(
        rank=ranks.rank,
        hostname=socket.gethostname(),
        pid=os.getpid(),
        threads=found.threads,
        cpus=len(os.sched_getaffinity(0)),
        planned=planned,
        found=found,
    )
    return Machine(facts, read_cpu_flags())


def _open_session(
    options: TrainOptions, ranks: Ranks, events: Events, machines: list[Machine]
) -> Session:
    import torch

    torch.manual_seed(options.seed)
    hosts = {machine.facts.hostname: machine.flags for machine in machines}
    precision = choose_precision(options.dtype, hosts)
    events.emit(
        "start",
        world_size=ranks.size,
        hosts=list(hosts),
        backend=ranks.backend,
        dtype=precision.dtype,
        model=options.model,
        versions=_versions(),
    )
    events.note(f"{precision.dtype}: {precision.reason}")
    events.note(f"{ranks.backend}: {ranks.backend_reason}")
    place = machines[0].facts.found
    events.note(f"rank 0: CPUs {place.cpus}, threads {place.threads}, memory {place.memory}")
    if options.ipex:
        load_ipex()  # now: that it is missing must not show after minutes
    names = [machine.facts.hostname for machine in machines]
    return Session(options, ranks, events, precision, names)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name, package in _PACKAGES.items():
        try:
            found[name] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _load_data(options: TrainOptions, events: Events) -> Data:
    skipped: list[DatasetError] = []
    bad = skipped if options.skip_bad_records else None
    if options.data is None:
        train_set, eval_set = load_hub_dataset(options.dataset, bad)
        train_source, eval_source = (f"{options.dataset} ({x})" for x in ("train", "validation"))
    else:
        train_set = eval_set = read_dataset(options.data, bad)
        train_source = eval_source = options.data
    if options.eval is not None:
        eval_set, eval_source = read_dataset(options.eval, bad), options.eval
    if skipped:
        events.note(skip_note(skipped))
    if eval_source == train_source:
        events.note("no --eval: the figures are on the training data itself, not on unseen data")
    return Data(train_set, train_source, eval_set, eval_source)


def _results(
    session: Session,
    machines: list[Machine],
    data: Data,
    features: int,
    trained: Progress,
    scores: Scores,
    phases: Phases,
) -> Results:
    options, ranks, precision = session.options, session.ranks, session.precision
    return Results(
        em=round(scores.em, 3),
        f1=round(scores.f1, 3),
        eval_questions=len(data.eval),
        train_questions=len(data.train),
        train_features=features,
        loss_curve=trained.curve,
        resumed_after=[step for step, _ in trained.resumed],
        samples_per_second=round(trained.samples / trained.seconds, 3),
        tokens_per_second=round(trained.tokens / trained.seconds, 1),
        seconds=phases.seconds(),
        world_size=ranks.size,
        ranks=[machine.facts for machine in machines],
        backend=ranks.backend,
        backend_reason=ranks.backend_reason,
        dtype=precision.dtype,
        dtype_reason=precision.reason,
        amx=all(machine.flags >= AMX_FLAGS for machine in machines),
        batch_size_per_rank=options.batch_size,
        epochs=options.epochs,
        learning_rate=options.highest_rate(ranks.size),
        seed=options.seed,
        model=options.model,
        data=data.train_source,
        eval_data=data.eval_source,
        versions=_versions(),
    )
