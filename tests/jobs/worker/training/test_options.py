from __future__ import annotations

import math
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from jobs.worker.tasks.squad.task import DEMO, SAMPLE, SquadOptions


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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epochs": 20000}, "--epochs 20000 is out of range: 0 to 10000"),
        ({"learning_rate": math.nan}, "--learning-rate nan is out of range: 1e-08 to 1"),
        ({"learning_rate": 0.0}, "--learning-rate 0.0 is out of range: 1e-08 to 1"),
        ({"max_length": 8}, "--max-length 8 is out of range: 16 to 8192"),
        ({"max_length": 128}, "--stride 128 is out of range: at most half of --max-length (128)"),
        ({"seed": -1}, "--seed -1 is out of range: 0 to 2147483647"),
        ({"trial_seconds": 0}, "--trial-seconds 0 is out of range: 1 to 3600"),
        ({"dtype": "fp16"}, "--dtype 'fp16' is unknown: one of auto, bf16, fp32"),
        ({"backend": "nccl"}, "--backend 'nccl' is unknown: one of auto, ccl, gloo"),
        ({"freeze_layers": "0"}, "--freeze-layers '0' is neither a number of layers, from 1, nor"),
        ({"freeze_layers": "head"}, "--freeze-layers 'head' is neither a number"),
        ({"layer_decay": 0.0}, "--layer-decay 0.0 is out of range: 0.01 to 1"),
        ({"model": ""}, "--model is empty"),
        ({"data": "a.json", "dataset": "b"}, "--data and --dataset can't be used together"),
        (
            {"eval_every": "0"},
            "--eval-every '0' is neither a number of steps, from 1, nor one of a",
        ),
        ({"eval_every": "1.5"}, "--eval-every '1.5' is neither"),
        ({"metric": "accuracy"}, "--metric 'accuracy' is unknown: one of "),
        ({"eval_every": "never", "patience": 2}, "--patience needs evaluations"),
        (
            {"dtype": "int8", "compile": "off"},
            "--dtype int8 is for layers that torch.compile compiles, not",
        ),
        (
            {"dtype": "int8", "ipex": True},
            "--dtype int8 is for layers that torch.compile compiles, not",
        ),
        ({"patience": 0}, "--patience 0 is out of range"),
        ({"lr_schedule": "step"}, "--lr-schedule 'step' is unknown: one of linear, cosine, consta"),
        ({"weight_decay": -0.1}, "--weight-decay -0.1 is out of range"),
        ({"max_grad_norm": 0.0}, "--max-grad-norm 0.0 is out of range"),
    ],
)
def test_a_value_that_can_not_be_used_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        SquadOptions(**given)


def test_the_laptop_needs_no_installed_package(node_environ: dict[str, str]) -> None:
    modules = "worker.bench, worker.tasks, worker.tasks.squad.dataset"
    modules += ", worker.runtime.events, worker.runtime.pinning, worker.runtime.process"
    # -S leaves site-packages out.
    check = f"import {modules}; worker.tasks.squad.dataset.read_dataset({str(SAMPLE)!r})"
    subprocess.run([sys.executable, "-S", "-c", check], env=node_environ, check=True, timeout=60)
