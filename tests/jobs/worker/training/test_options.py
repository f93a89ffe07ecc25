from __future__ import annotations

import math
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from jobs.worker.tasks.squad.task import DEMO, SAMPLE, SquadOptions

EVERYTHING = SquadOptions(
    model="-odd name",
    data="/data/train ü.json",
    eval="dev.json",
    output="out",
    epochs=3,
    batch_size=7,
    learning_rate=1.25e-4,
    warmup_ratio=0.0,
    max_length=256,
    stride=64,
    seed=0,
    dtype="bf16",
    backend="ccl",
    accumulate=2,
    compile="off",
    wire="fp32",
    attention_dropout="on",
    freeze_layers="2",
    layer_decay=0.9,
    ipex=True,
    skip_bad_records=True,
    token_cache="none",
    max_steps=11,
    checkpoint_every=7,
    keep_checkpoints=3,
    resume=True,
    trial_seconds=5,
)


@pytest.mark.parametrize(
    "options",
    [SquadOptions(), DEMO, EVERYTHING, SquadOptions(dataset="own/squad")],
    ids=["defaults", "demo", "everything", "hub"],
)
def test_the_options_reach_the_ranks(options: SquadOptions) -> None:
    assert SquadOptions.from_json(options.to_json()) == options


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epochs": 20000}, "--epochs 20000 is out of range: 0 to 10000"),
        ({"batch_size": -1}, "--batch-size -1 is out of range: 1 to 4096"),
        ({"learning_rate": math.nan}, "--learning-rate nan is out of range: 1e-08 to 1"),
        ({"learning_rate": 0.0}, "--learning-rate 0.0 is out of range: 1e-08 to 1"),
        ({"warmup_ratio": 1.01}, "--warmup-ratio 1.01 is out of range: 0 to 1"),
        ({"max_length": 8}, "--max-length 8 is out of range: 16 to 8192"),
        ({"max_length": 128}, "--stride 128 is out of range: at most half of --max-length (128)"),
        ({"seed": -1}, "--seed -1 is out of range: 0 to 2147483647"),
        ({"max_steps": 0}, "--max-steps 0 is out of range: 1 to 1000000000"),
        ({"keep_checkpoints": 0}, "--keep-checkpoints 0 is out of range: 1 to 1000"),
        ({"trial_seconds": 0}, "--trial-seconds 0 is out of range: 1 to 3600"),
        ({"dtype": "fp16"}, "--dtype 'fp16' is unknown: one of auto, bf16, fp32"),
        (
            {"freeze_layers": "0"},
            "--freeze-layers '0' is neither a number of layers, from 1, nor emb",
        ),
        ({"freeze_layers": "head"}, "--freeze-layers 'head' is neither a number"),
        ({"layer_decay": 0.0}, "--layer-decay 0.0 is out of range: 0.01 to 1"),
        ({"model": ""}, "--model is empty"),
        ({"data": "a.json", "dataset": "b"}, "--data and --dataset can't be used together"),
    ],
)
def test_a_value_out_of_range_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        SquadOptions(**given)


def test_wrong_choices_are_refused_without_a_parser() -> None:
    with pytest.raises(ValueError, match="--backend 'nccl' is unknown: one of auto, ccl, gloo"):
        replace(DEMO, backend="nccl")


def test_the_demo_trains_from_scratch_on_the_sample() -> None:
    assert (DEMO.model, DEMO.data) == ("scratch", str(SAMPLE))


def test_the_laptop_needs_no_installed_package(node_environ: dict[str, str]) -> None:
    modules = "worker.bench, worker.tasks, worker.tasks.squad.dataset"
    modules += ", worker.runtime.events, worker.runtime.pinning, worker.runtime.process"
    # -S leaves site-packages out.
    check = f"import {modules}; worker.tasks.squad.dataset.read_dataset({str(SAMPLE)!r})"
    subprocess.run([sys.executable, "-S", "-c", check], env=node_environ, check=True, timeout=60)
