"""The job as the nodes run it: the shipped package ``worker``, one process per rank."""

from __future__ import annotations

import copy
import json
import os
import random
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from jobs.worker.runtime.events import parse_event
from jobs.worker.runtime.precision import Precision
from jobs.worker.runtime.ranks import ASKED, Ranks
from jobs.worker.tasks.squad.answers import MAX_ANSWER_TOKENS
from jobs.worker.tasks.squad.dataset import Question
from jobs.worker.tasks.squad.features import build_features
from jobs.worker.tasks.squad.task import DEMO, SAMPLE, Squad, SquadOptions
from jobs.worker.training.batches import TrainingRun
from jobs.worker.training.checkpoints import list_checkpoints
from jobs.worker.training.optimizer_step import find_idle
from jobs.worker.training.run import actual_precision
from jobs.worker.training.task import Loaded
from tests.harness.forked import Forked
from tests.jobs.worker.threaded_ranks import session

TIMEOUT = 240
"""Seconds after which a rank that hangs fails its test."""
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


class Ended(NamedTuple):
    code: int
    events: list[dict[str, Any]]
    output: str

    def of(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == name]


@pytest.mark.parametrize("used", [True, False])
def test_results_say_int8_only_if_it_was_used(used: bool) -> None:
    parts = ["2 compiled layers", *(["int8 products"] if used else [])]
    found = actual_precision(Precision("bf16", "why", int8=True), parts)
    why = {"dtype": "bf16", "dtype_reason": "int8 was not used (see the log); why"}
    assert found == ({} if used else why)
    assert actual_precision(Precision("bf16", ""), parts) == {}


def free_port() -> int:
    """Return a port that is free for torch, and the one below it for the heartbeat.

    It is none of those that the kernel gives to connections: they may be taken before the ranks start.
    """
    while True:
        port = random.randrange(10_001, 32_000)
        with (
            suppress(OSError),
            socket.create_server(("127.0.0.1", port)),
            socket.create_server(("127.0.0.1", port - 1)),
        ):
            return port


def rank_environs(
    size: int, local: int = 1, more: Mapping[str, str] = MappingProxyType({})
) -> list[dict[str, str]]:
    """Return what mpirun gives to each rank, on machines with ``local`` ranks each."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"PMI_SIZE": str(size), "MPI_LOCALNRANKS": str(local)}
    return [
        {
            **os.environ,
            **LOOPBACK,
            **common,
            "PMI_RANK": f"{n}",
            "MPI_LOCALRANKID": f"{n % local}",
            **more,
        }
        for n in range(size)
    ]


def run_ranks(
    folder: Path,
    options: Sequence[SquadOptions | Sequence[str]],
    local: int = 1,
    more: Mapping[str, str] = MappingProxyType({}),
) -> list[Ended]:
    """Run one process per options, or per words for Python, to their ends."""
    argvs = [squad_argv(each) if isinstance(each, SquadOptions) else each for each in options]
    environs = rank_environs(len(options), local, more)
    ranks = [Forked(argv, folder, each) for argv, each in zip(argvs, environs, strict=True)]
    # One after another: their ends need not come in this order.
    return [finish(each) for each in ranks]


def squad_argv(options: SquadOptions) -> list[str]:
    return ["-m", "worker.tasks", "squad", options.to_json()]


def finish(process: Forked) -> Ended:
    code, output = process.finish(TIMEOUT)
    found = [parse_event(line) for line in output.splitlines()]
    return Ended(code, [event for event in found if event], output)


def small(folder: Path, output: str, batch_size: int) -> SquadOptions:
    return replace(
        DEMO,
        data=str(folder / "data.json"),
        output=str(folder / output),
        epochs=2,
        batch_size=batch_size,
        dtype="fp32",
        backend="gloo",
        token_cache=str(folder / "cache"),
    )


def start_torchrun(folder: Path, options: SquadOptions, ranks: int = 2) -> Forked:
    """Start the real torchrun with the variables of a pod, as Kubeflow's operators do."""
    pod = {"PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": str(ranks)}
    pod |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_port())}
    # What the operator of PyTorchJob also sets, about pods instead of ranks.
    pod |= {**LOOPBACK, "RANK": "0", "WORLD_SIZE": str(ranks), "OMP_PROC_BIND": "false"}
    argv = ["-m", "torch.distributed.run", *squad_argv(options)]
    return Forked(argv, folder, {**os.environ, **pod})


@pytest.mark.parametrize(
    ("dtype", "wire", "tolerance"),
    [("fp32", "fp32", 2e-5), ("bf16", "bf16", 2e-2)],
)
def test_two_ranks_train_as_one(
    nodes_folder: Path, dtype: str, wire: str, tolerance: float
) -> None:
    """Also under torchrun."""
    # transformers' loss for questions depends on padding, so all batches get the same width.
    (code,) = nodes_folder.rglob("training/batches.py")
    text = code.read_text()
    assert "\nALIGN = 2\n" in text
    code.write_text(text.replace("\nALIGN = 2\n", "\nALIGN = 32\n"))
    two = replace(small(nodes_folder, "two", batch_size=4), dtype=dtype, wire=wire)
    # Each node has one of the names.
    interfaces = {"GLOO_SOCKET_IFNAME": "ens5,lo,enp2s0"}
    first, second = run_ranks(nodes_folder, [two] * 2, more=interfaces)
    assert (first.code, second.code) == (0, 0), first.output + second.output
    assert second.events == [], "only rank 0 speaks"
    check_events(first)
    check_metrics(nodes_folder / "two.state")
    results = json.loads((nodes_folder / "two" / "results.json").read_text())
    check_results(results)
    (said,) = first.of("result")
    assert said == {"event": "result", **results, "at": said["at"]}
    if dtype == "fp32":  # as transformers computes
        check_model(nodes_folder / "two", results)
        check_torchrun(nodes_folder, two, results)

    one = replace(small(nodes_folder, "one", batch_size=8), dtype=dtype)
    alone = finish(Forked(squad_argv(one), nodes_folder, {**os.environ, **LOOPBACK}))
    assert alone.code == 0, alone.output
    single = json.loads((nodes_folder / "one" / "results.json").read_text())
    assert single["world_size"] == 1
    # Same seed, same global batches, no dropout: summing gradients over two ranks
    # must give the very training that one rank does alone.
    assert [step for step, _ in single["loss_curve"]] == [step for step, _ in results["loss_curve"]]
    losses, expected = ([loss for _, loss in r["loss_curve"]] for r in (results, single))
    assert losses == pytest.approx(expected, abs=tolerance)
    assert losses[-1] < losses[0]


def check_events(ended: Ended) -> None:
    (begin,) = ended.of("start")
    assert (begin["world_size"], begin["backend"]) == (2, "gloo")
    phases = [event["name"] for event in ended.of("phase")]
    assert phases == ["load", "tokenize", "train", "save", "evaluate"]
    last = ended.of("step")[-1]
    assert last["step"] == last["total"] == 4
    assert last["epoch"] == 2.0
    assert last["samples_per_second"] > 0
    assert sum(last["shares"].values()) == pytest.approx(1)


def check_metrics(folder: Path) -> None:
    files = [folder / "metrics" / f"rank-{rank}.jsonl" for rank in (0, 1)]
    one, other = ([json.loads(each) for each in file.read_text().splitlines()] for file in files)
    assert [(each["step"], each["samples"]) for each in one] == [(n, 4) for n in range(1, 5)]
    assert [each["loss"] for each in one] == [each["loss"] for each in other]


def check_torchrun(folder: Path, options: SquadOptions, expected: dict[str, Any]) -> None:
    pod = finish(start_torchrun(folder, replace(options, output=str(folder / "torchrun"))))
    assert pod.code == 0, pod.output
    found = json.loads((folder / "torchrun" / "results.json").read_text())
    for same in ("loss_curve", "f1", "em", "world_size", "train_samples"):
        assert found[same] == expected[same], same
    assert [(each["rank"], each["threads"]) for each in found["ranks"]] == [(0, 1), (1, 1)]
    assert all((folder / f"torchrun.state/logs/rank-{rank}.log").is_file() for rank in (0, 1))


def test_a_stopped_pod_leaves_a_checkpoint(nodes_folder: Path) -> None:
    # The arguments of a restarted pod, from the first time on: it has no others.
    pod = replace(small(nodes_folder, "pod", batch_size=4), epochs=40, resume=True)

    process = start_torchrun(nodes_folder, pod, ranks=1)
    printed = iter(process.stdout)
    assert any('"event": "step"' in line for line in printed)
    process.send_signal(signal.SIGTERM)  # as kubelet does

    (stopped,) = finish(process).of("stopped")
    (kept,) = list_checkpoints(nodes_folder / "pod")
    assert kept.name == stopped["checkpoint"] == f"step-{stopped['step']:06d}"


def check_results(results: dict[str, Any]) -> None:
    assert results["world_size"] == 2
    assert results["fast"] == ["only the data's words"]
    assert [rank["rank"] for rank in results["ranks"]] == [0, 1]
    assert len({rank["pid"] for rank in results["ranks"]}) == 2
    assert [rank["threads"] for rank in results["ranks"]] == [1, 1]
    assert (results["backend"], results["backend_reason"]) == ("gloo", ASKED)
    assert results["train_records"] == results["eval_records"] == results["train_samples"] == 16
    assert 0 <= results["em"] <= results["f1"] <= 100
    assert results["samples_per_second"] > 0
    phases = ["load", "tokenize", "train", "save", "evaluate"]
    assert list(results["seconds"]) == [*phases, "total"]
    assert sum(results["seconds"][phase] for phase in phases) <= results["seconds"]["total"]


def check_model(output: Path, results: dict[str, Any]) -> None:
    """Check that the saved model gives the run's answers."""
    from transformers import AutoModelForQuestionAnswering, AutoTokenizer

    predictions = json.loads((output / "predictions.json").read_text())
    assert len(predictions) == results["eval_records"]
    assert not list(output.glob(".*")), "no half-written file is left"
    model = AutoModelForQuestionAnswering.from_pretrained(output / "model")
    tokenizer = AutoTokenizer.from_pretrained(output / "model")
    paragraph = json.loads(SAMPLE.read_text())["data"][0]["paragraphs"][0]
    question = paragraph["qas"][0]
    encoded = tokenizer(question["question"], paragraph["context"], return_tensors="pt")
    offsets = tokenizer(
        question["question"], paragraph["context"], return_offsets_mapping=True
    ).offset_mapping
    answer = model.eval()(**encoded)
    inside = [index for index, part in enumerate(encoded.sequence_ids(0)) if part == 1]
    spans = [(a, b) for a in inside for b in inside if a <= b < a + MAX_ANSWER_TOKENS]
    starts, ends = answer.start_logits[0].tolist(), answer.end_logits[0].tolist()
    first, last = max(spans, key=lambda span: starts[span[0]] + ends[span[1]])
    found = paragraph["context"][offsets[first][0] : offsets[last][1]]
    assert predictions[question["id"]] == found


def test_a_failing_rank_ends_all(nodes_folder: Path) -> None:
    good = small(nodes_folder, "out", batch_size=4)
    bad = replace(good, data=str(nodes_folder / "none.json"))
    first, second = run_ranks(nodes_folder, [good, bad])
    assert (first.code, second.code) == (1, 1)
    (cause,) = second.of("error")
    assert "none.json: can't be read" in cause["message"]
    assert (cause["rank"], cause["lost_peer"]) == (1, False)
    (effect,) = first.of("error")
    assert (effect["rank"], effect["lost_peer"]) == (0, True), first.output
    assert "Traceback" not in first.output + second.output
    assert not (nodes_folder / "out" / "results.json").exists()


def test_ranks_train_a_model_that_has_idle_parameters(
    nodes_folder: Path, tokenizer: Any, questions: list[Question]
) -> None:
    from transformers import XLNetConfig, XLNetForQuestionAnsweringSimple

    torch.manual_seed(1)
    shape = {"vocab_size": len(tokenizer), "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16}
    model = XLNetForQuestionAnsweringSimple(XLNetConfig(**shape))
    named = copy.deepcopy(tokenizer)
    for names, expected in (
        (["input_ids", "token_type_ids"], {"mask_emb"}),
        (["input_ids"], {"mask_emb", "r_s_bias", "seg_embed"}),
    ):
        named.model_input_names = names
        features = build_features(questions[:1], named, 64, 16)
        run = TrainingRun(session(DEMO, Ranks()), Squad(DEMO), Loaded(model, named), features)
        idle = {id(each) for each in find_idle(run)}
        found = [name for name, each in model.named_parameters() if id(each) in idle]
        assert {name.rpartition(".")[2] for name in found} == expected
    model.save_pretrained(nodes_folder / "xlnet")
    tokenizer.save_pretrained(nodes_folder / "xlnet")
    chosen = replace(
        small(nodes_folder, "idle", batch_size=4), model=str(nodes_folder / "xlnet"), wire="fp32"
    )

    first, second = run_ranks(nodes_folder, [chosen] * 2)

    assert (first.code, second.code) == (0, 0), first.output + second.output
    assert first.of("step")[-1]["step"] == 4
