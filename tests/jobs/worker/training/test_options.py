from __future__ import annotations

import math
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from jobs.worker.tasks.embed.options import EmbedOptions
from jobs.worker.tasks.lm.model import LmOptions
from jobs.worker.tasks.score import ScoreOptions
from jobs.worker.tasks.squad.task import DEMO, SAMPLE, SquadOptions
from jobs.worker.training.options import TrainOptions


@pytest.mark.parametrize(
    "options",
    [
        SquadOptions(),
        DEMO,
        SquadOptions(dataset="own/squad"),
        replace(DEMO, model="-odd name", data="/data/train ü.json", learning_rate=1.25e-4, seed=0),
        replace(DEMO, freeze_layers="2", layer_decay=0.9, ipex=True, max_steps=11, resume=True),
    ],
)
def test_the_options_reach_the_ranks(options: SquadOptions) -> None:
    assert SquadOptions.from_json(options.to_json()) == options


RANKING = {"objective": "ranking"}


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (SquadOptions, {"epochs": 20000}, "--epochs 20000 is out of range: 0 to 10000"),
        (SquadOptions, {"learning_rate": math.nan}, "--learning-rate nan is out of range: 1e-08 t"),
        (SquadOptions, {"learning_rate": 0.0}, "--learning-rate 0.0 is out of range: 1e-08 to 1"),
        (SquadOptions, {"max_length": 128}, "--stride 128 is out of range: at most half of --max"),
        (SquadOptions, {"dtype": "fp16"}, "--dtype 'fp16' is unknown: one of auto, bf16, fp32"),
        (SquadOptions, {"freeze_layers": "0"}, "--freeze-layers '0' is neither a number of layers"),
        (SquadOptions, {"freeze_layers": "head"}, "--freeze-layers 'head' is neither a number"),
        (SquadOptions, {"model": ""}, "--model is empty"),
        (SquadOptions, {"data": "a.json", "dataset": "b"}, "--data and --dataset can't be used"),
        (
            SquadOptions,
            {"eval_every": "0"},
            "--eval-every '0' is neither a number of steps, from 1",
        ),
        (SquadOptions, {"eval_every": "1.5"}, "--eval-every '1.5' is neither"),
        (SquadOptions, {"metric": "accuracy"}, "--metric 'accuracy' is unknown: one of "),
        (SquadOptions, {"eval_every": "never", "patience": 2}, "--patience needs evaluations"),
        (
            SquadOptions,
            {"dtype": "int8", "compile": "off"},
            "--dtype int8 is for layers that torch",
        ),
        (SquadOptions, {"dtype": "int8", "ipex": True}, "--dtype int8 is for layers that torch."),
        (ScoreOptions, {"metric": "mrr"}, "--metric mrr: not with --objective regression"),
        (ScoreOptions, {"metric": "mse", **RANKING}, "--metric mse: not with --objective ranking"),
        (ScoreOptions, {"label_column": "x", **RANKING}, "--label-column: --objective ranking has"),
        (ScoreOptions, {"negative_column": "x"}, "--negative-column has an effect only with --obj"),
        (EmbedOptions, {"accumulate": 2}, "--accumulate: `embed` needs whole batches"),
        (EmbedOptions, {"matryoshka": "64,x"}, "--matryoshka '64,x': expected numbers such as 2"),
        (EmbedOptions, {"teacher": "a.csv"}, "--teacher: `embed` learns vectors: give a model"),
        (LmOptions, {"model": "scratch", "lora": True}, "--lora trains adapters of a model's weig"),
        (
            ScoreOptions,
            {"student_layers": 2, "model": "m"},
            "--student-layers: the student is made",
        ),
        (ScoreOptions, {"teacher": "s.csv", "student_layers": 2}, "--student-layers needs a model"),
        (ScoreOptions, {"teacher": "s.csv.gz", "eval_fraction": 0.1}, "--teacher with a file has "),
    ],
)
def test_a_value_that_can_not_be_used_is_refused(
    kind: type[TrainOptions], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        kind(**given)


def test_the_laptop_needs_no_installed_package(node_environ: dict[str, str]) -> None:
    modules = "worker.bench, worker.tasks, worker.tasks.squad.dataset"
    modules += ", worker.runtime.events, worker.runtime.pinning, worker.runtime.process"
    # -S leaves site-packages out.
    check = f"import {modules}; worker.tasks.squad.dataset.read_dataset({str(SAMPLE)!r})"
    subprocess.run([sys.executable, "-S", "-c", check], env=node_environ, check=True, timeout=60)
