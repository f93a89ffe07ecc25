"""A run that is killed and resumed equals one that was not: every loss and weight, to the bit."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jobs.worker.runtime.output import state_folder
from jobs.worker.tasks import TASKS
from jobs.worker.training.checkpoints import list_checkpoints
from jobs.worker.training.options import TrainOptions
from tests.jobs.worker.conftest import write_part
from tests.jobs.worker.forked_ranks import Ran, run_forked

STEPS = 12
DISK_PER_CHECKPOINT = 4
"""Syncs: state, description, the folder before its renaming, and its parent afterward."""


class Made(NamedTuple):
    """The results of a finished run."""

    losses: list[list[tuple[int, float, int]]]
    """(step, loss, tokens) of each rank."""
    weights: bytes
    predictions: str
    results: dict[str, Any]


def made(output: Path, ranks: int = 2) -> Made:
    files = [state_folder(output) / "metrics" / f"rank-{rank}.jsonl" for rank in range(ranks)]
    lines = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    result = json.loads((output / "results.json").read_text())
    same = {"scores", "loss_curve", "train_samples", "world_size", "epochs"}
    same |= {"evaluations", "model_step"}
    return Made(
        [[(each["step"], each["loss"], each["tokens"]) for each in rank] for rank in lines],
        (output / "model" / "model.safetensors").read_bytes(),
        (output / "predictions.json").read_text(),
        {name: result[name] for name in same},
    )


def options(folder: Path, output: str, task: str = "squad", **more: Any) -> TrainOptions:
    """Twelve steps of two ranks, three epochs, a checkpoint after every other one.

    With ``eval_every``, the evaluation data are a copy, which may choose the best model.
    """
    chosen: dict[str, Any] = {
        "epochs": 3,
        "batch_size": 2,
        "checkpoint_every": 2,
        "backend": "gloo",
    }
    chosen |= {"dtype": "fp32", "compile": "off"}
    chosen["output"] = str(folder / output)
    if task == "squad":
        chosen["data"] = str(folder / "data.json")
    else:  # more than three epochs of twelve steps
        chosen["max_steps"] = STEPS
    if "eval_every" in more and task != "digits":  # which has its own data
        data = Path(chosen.get("data") or TASKS[task].demo.data)
        chosen["eval"] = str(shutil.copy(data, folder / f"unseen{data.suffix}"))
    found: TrainOptions = replace(TASKS[task].demo, **{**chosen, **more})
    return found


def check_killed_and_resumed(
    folder: Path,
    kills: list[dict[str, Any]],
    ranks: int = 2,
    task: str = "squad",
    **more: Any,
) -> None:
    """Kill a run at each point and resume it; compare all with one that is not interrupted."""
    runs: list[tuple[TrainOptions, dict[str, Any]]] = [
        (options(folder, "whole", task, **more), {"ranks": ranks})
    ]
    for number, kill in enumerate(kills):
        chosen = options(folder, f"killed-{number}", task, **more)
        runs.append((chosen, {**kill, "ranks": ranks}))
        runs.append((replace(chosen, resume=True), {"ranks": ranks}))
    whole, *others = run_forked(runs)
    assert whole.codes == [0] * ranks, whole.texts
    expected = made(folder / "whole", ranks)
    assert [step for step, _, _ in expected.losses[0]] == list(
        range(1, 1 + len(expected.losses[0]))
    )
    if "eval_every" in more:
        scores, step = expected.results["scores"], expected.results["model_step"]
        (best,) = [each for each in expected.results["evaluations"] if each["step"] == step]
        assert scores == {name: pytest.approx(best[name], rel=1e-3) for name in scores}
    for number, kill in enumerate(kills):
        killed, resumed = others[2 * number : 2 * number + 2]
        assert -signal.SIGKILL in killed.codes, (kill, killed.texts)
        assert resumed.codes == [0] * ranks, (kill, resumed.texts)
        found = made(folder / f"killed-{number}", ranks)
        assert found.losses == expected.losses, kill
        assert found == expected, kill
        assert len(list_checkpoints(folder / f"killed-{number}")) == 2, kill
        assert not list((folder / f"killed-{number}.state" / "checkpoints").glob("*.partial"))


# The folder of the second checkpoint before it gets its name. A test for `make test-full` has all writes.
AMID_CHECKPOINT = {"at": "disk", "step": DISK_PER_CHECKPOINT + 3}
EVERY_OTHER = {"eval_every": "2"}
BY_LAYER = {**EVERY_OTHER, "freeze_layers": "embeddings", "layer_decay": 0.5, "weight_decay": 0.1}
SHORT = {"max_length": 32, "stride": 8, "max_steps": 8}
AMID_EVALUATION = {"at": "evaluation", "step": 3}
AT_THE_END = {"at": "step", "step": STEPS}
AT_SEVEN = {"at": "step", "step": 7}


@pytest.mark.parametrize(
    ("kills", "more"),
    [
        ([AT_THE_END, AMID_EVALUATION, AMID_CHECKPOINT], {"ranks": 1, **EVERY_OTHER}),
        # test_teacher.py has the other two, as students.
        *(
            ([AMID_EVALUATION], {"task": task, "ranks": 1, **EVERY_OTHER})
            for task in sorted({*TASKS} - {"squad", "classify", "embed"})
        ),
        # Compiled layers with weights in bf16; windows of one length are compiled once.
        ([AT_SEVEN], {"dtype": "bf16", "compile": "on", "ranks": 1, **SHORT, **BY_LAYER}),
        # Sums that depend on their order, and the best weights for other ranks.
        ([{**AT_SEVEN, "rank": 2}], {"ranks": 3, **BY_LAYER, "eval_every": "4"}),
    ],
)
def test_killed_and_resumed(
    nodes_folder: Path, kills: list[dict[str, Any]], more: dict[str, Any]
) -> None:
    check_killed_and_resumed(nodes_folder, kills, **more)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A run of two ranks that is not interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    write_part(folder)
    (ran,) = run_forked([(options(folder, "out"), {})])
    assert ran.codes == [0, 0], ran.texts
    return made(folder / "out")


def test_sigterm_on_one_rank_keeps_a_checkpoint_and_ends_all(
    nodes_folder: Path, whole: Made
) -> None:
    """No checkpoint is due by time; only the signal causes one, a step later."""
    folder = nodes_folder
    rare: dict[str, Any] = {"checkpoint_every": None}
    runs: list[tuple[TrainOptions, dict[str, Any]]] = []
    for step in (5, STEPS):
        term = {"at": "step", "step": step, "rank": 1, "signal": signal.SIGTERM}
        runs.append((options(folder, f"stopped-{step}", **rare), term))
        runs.append((options(folder, f"stopped-{step}", **rare, resume=True), {}))

    ran = run_forked(runs)

    for step, last, (stopped, resumed) in ((5, 6, ran[:2]), (STEPS, STEPS, ran[2:])):
        assert (stopped.codes, resumed.codes) == ([143, 143], [0, 0])
        (result,) = stopped.of("stopped")
        assert (result["step"], result["checkpoint"]) == (last, f"step-{last:06d}")
        assert not stopped.of("error")
        (told_again,) = resumed.of("resumed")
        assert told_again["step"] == last
        assert made(folder / f"stopped-{step}") == whole
        results = json.loads((folder / f"stopped-{step}" / "results.json").read_text())
        assert results["resumed_after"] == [last]
        assert results["tokens_per_second"] > 0


def test_a_rank_without_the_checkpoint_gets_it_from_rank_0(nodes_folder: Path, whole: Made) -> None:
    """As after a worker was replaced: each rank has its own disk, and rank 1's is empty."""
    folder = nodes_folder
    own = options(folder, "own-RANK")
    kill, again = {"at": "step", "step": 7, "rank": 1}, replace(own, resume=True)

    killed, short, refused, resumed = run_forked(
        [(own, kill), (replace(again, max_steps=2), {}), (own, {"ranks": 1}), (again, {})]
    )

    assert killed.codes[1] == -signal.SIGKILL
    assert error_of(short) == "the checkpoint is at step 6, and the run has only 2 steps"
    assert "holds the checkpoints of an unfinished run" in error_of(refused)
    assert resumed.codes == [0, 0], resumed.texts
    assert list_checkpoints(folder / "own-0")
    assert not list_checkpoints(folder / "own-1")
    for rank in range(2):
        file = folder / f"own-{rank}.state" / "metrics" / f"rank-{rank}.jsonl"
        found = [json.loads(line)["loss"] for line in file.read_text().splitlines()]
        assert found[-6:] == [loss for _, loss, _ in whole.losses[rank]][-6:]
    assert (folder / "own-0" / "model" / "model.safetensors").read_bytes() == whole.weights


def error_of(ran: Ran) -> str:
    """Return rank 0's error message."""
    assert ran.codes[0] == 1, ran.texts
    (error,) = ran.of("error")
    message: str = error["message"]
    return message


def test_a_diverging_run_stops_and_keeps_the_last_good_checkpoint(nodes_folder: Path) -> None:
    folder = nodes_folder
    long: dict[str, Any] = {"max_steps": 160, "epochs": 100, "checkpoint_every": 5}
    infinite, diverged = run_forked(
        [
            (options(folder, "nan", **long), {"ranks": 1, "step": 8, "loss": float("nan")}),
            (options(folder, "up", **long), {"ranks": 1, "step": 8, "loss": 60.0}),
        ]
    )

    assert error_of(infinite) == "the loss or its gradient became infinite at step 8 of 160"
    assert [path.name for path in list_checkpoints(folder / "nan")] == ["step-000005"]
    hints = [event["hint"] for event in infinite.of("error")]
    assert hints == [
        "lower --learning-rate, or use --dtype fp32, with --resume from step-000005, which is kept"
    ]
    assert "the loss diverged: at step " in error_of(diverged)
    assert list_checkpoints(folder / "up")[0].name == "step-000005"


def test_a_full_disk_costs_a_checkpoint_but_not_the_run_or_a_log(nodes_folder: Path) -> None:
    folder = nodes_folder
    full = {"at": "disk", "step": DISK_PER_CHECKPOINT + 1, "full": True}
    (ran,) = run_forked([(options(folder, "out", max_steps=5), full)])

    assert ran.codes == [0, 0], ran.texts
    notes = [event["text"] for event in ran.of("note")]
    (warning,) = [note for note in notes if note.startswith("warning: checkpoint")]
    assert warning.endswith("No space left on device; training continues without it")
    kept = [path.name for path in list_checkpoints(folder / "out")]
    assert kept == ["step-000002", "step-000005"]
    assert len(list((folder / "out.state" / "checkpoints").iterdir())) == 2
    logs = [(folder / "out.state" / "logs" / f"rank-{rank}.log").read_text() for rank in range(2)]
    assert logs == ran.texts
    assert logs[0].count("@spr") > 5
    assert "@spr" not in logs[1]


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_killed_at_every_step(nodes_folder: Path, rank: int) -> None:
    steps = [{"at": "step", "step": step, "rank": rank} for step in range(1, STEPS + 1)]
    check_killed_and_resumed(nodes_folder, steps)


@pytest.mark.full
def test_killed_at_every_write_to_the_disk(nodes_folder: Path) -> None:
    writes = range(1, STEPS // 2 * DISK_PER_CHECKPOINT + 1)
    check_killed_and_resumed(nodes_folder, [{"at": "disk", "step": n} for n in writes])
