"""What the benchmarks of training rest on; their figures are taken by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.baseline import Settings, drive_run_qa
from benchmarks.quality import Curve, interval, mean_curve, time_to
from benchmarks.squad_data import draw
from benchmarks.squad_sides import RUN_STEPS, Round
from benchmarks.squad_speed import Played
from jobs.worker.tasks.squad.dataset import read_dataset
from jobs.worker.tasks.squad.features import Feature
from jobs.worker.tasks.squad.task import SAMPLE

SCRIPT = """
import json, pathlib, sys
words = dict(zip(sys.argv[1:], sys.argv[2:] + [""]))
output = pathlib.Path(words["--output_dir"])
(output / "train_results.json").write_text(json.dumps({
    "questions": json.loads(pathlib.Path(words["--train_file"]).read_text())["data"],
    "words": words,
}))
"""


def some_features(count: int) -> list[Feature]:
    sizes = np.random.default_rng(1).integers(60, 384, count)
    ids = np.zeros(384, dtype=np.int32)
    return [Feature(n, {"input_ids": ids[:size]}, 0, 0) for n, size in enumerate(sizes)]


def test_the_original_script_gets_its_settings_and_its_layout(tmp_path: Path) -> None:
    script = tmp_path / "run_qa.py"
    script.write_text(SCRIPT)
    questions = read_dataset(SAMPLE)[:3]
    settings = Settings(32, "bf16", grouped=True, epochs=2)

    result = drive_run_qa(script, "a model", questions, settings, tmp_path / "out")

    words = result["words"]
    assert (words["--max_seq_length"], words["--doc_stride"]) == ("384", "128")
    assert words["--per_device_train_batch_size"] == "32"
    assert words["--pad_to_max_length"] == "False"
    assert {"--bf16", "--do_train", "--use_cpu"} <= words.keys()
    first = result["questions"][0]
    assert list(first) == ["id", "context", "question", "answers"]
    at = first["answers"]["answer_start"][0]
    assert first["context"][at:].startswith(first["answers"]["text"][0])
    assert len(result["questions"]) == 3


@pytest.mark.parametrize("steps", [1, 2, 4, 7])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_features_of_a_round_are_alike_within_steps_and_like_all_together(
    steps: int, seed: int
) -> None:
    features = some_features(800)

    chosen = draw(features, steps, 8, seed)

    assert len({feature.question for feature in chosen}) == 8 * steps
    sizes = np.sort([len(feature) for feature in chosen])
    for batch in sizes.reshape(steps, 8):
        assert batch[-1] - batch[0] < 20
    everything = np.mean([len(feature) for feature in features])
    assert sizes.mean() == pytest.approx(everything, rel=0.25)


def test_preparation_counts_over_a_whole_run() -> None:
    long, short = (
        [Round(8, 1, 1.0, each, 1.0) for each in pair] for pair in ((101.0, 2.0), (3.0, 2.0))
    )
    played = Played([long, short, short[::-1]], [Round(32, 1, 1.0, 8.0, 1.0)])
    # Four steps of 2 s with 8 features each; the first ones took 99 s and 1 s more than when repeated.
    assert played.preparation == 100.0
    assert played.speed(4, 0) == pytest.approx(8 * RUN_STEPS / (100 + 2 * RUN_STEPS))


def test_the_time_to_f1_lies_between_epochs() -> None:
    curves = [
        Curve([10.0, 40.0], [50.0, 100.0], [0.0, 80.0]),
        Curve([30.0, 60.0], [70.0, 140.0], [20.0, 100.0]),
    ]
    mean = mean_curve(curves)
    assert mean == Curve([20.0, 50.0], [60.0, 120.0], [10.0, 90.0])
    assert time_to(35, mean) == pytest.approx(90)
    assert time_to(10, mean) == pytest.approx(30)
    assert time_to(51, mean) is None


def test_the_interval_is_that_of_seeds_and_questions() -> None:
    draws = np.random.default_rng(3).normal(50, 10, (2, 40, 200))
    # The same questions are hard for both sides, so only what differs counts.
    others, some = draws[0], draws[0] + draws[1] - 48
    low, high = interval(*([Curve([], [], [*row]) for row in side] for side in (some, others)))
    # 8,000 differences with a deviation of 10: a standard error of 0.11, and of 0.2 for sampling both ways.
    assert low < 2 < high
    # Sampling only one of both gives less than half a point.
    assert 0.6 < high - low < 0.9
    equal = [Curve([], [], [*row]) for row in others]
    assert interval(equal, equal) == (0.0, 0.0)
