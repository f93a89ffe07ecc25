"""Submitting, following, and explaining a job, with SSH faked."""

from __future__ import annotations

import io
import json
import tarfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.errors import JobError, UsageError
from jobs.cli.train import build_request
from jobs.train.request import (
    TrainRequest,
    check_inputs,
    data_files,
    local_data,
    needs_hub,
    options_on_nodes,
    spec_of,
)
from jobs.train.train import plan_training, train
from jobs.worker.spec import PlacementOptions, Resources
from jobs.worker.tasks.classify import ClassifyOptions
from jobs.worker.tasks.embed.options import EmbedOptions
from jobs.worker.tasks.lm.model import LmOptions
from jobs.worker.tasks.squad.task import DEMO, SquadOptions
from jobs.worker.training.options import BASE_MODEL
from provision.stacks.load import load_stack
from tests.fakes import FakeHost
from tests.jobs.context import (
    NOW,
    PATHS,
    RESULT,
    ended,
    event,
    job_context,
    listed,
    make_hosts,
    mpirun_line,
    pack_output,
    parse_request,
)


def run(
    hosts: dict[str, FakeHost],
    results: Path,
    events: list[Any] | None = None,
    log: list[str] | None = None,
    placement: PlacementOptions | None = None,
) -> Any:
    spec = spec_of(DEMO, resources=Resources(None, placement or PlacementOptions()))
    return train(job_context(hosts, events=events, log=log), TrainRequest(spec, results))


def test_damaged_results_are_one_line(tmp_path: Path) -> None:
    hosts = make_hosts([event(**RESULT)])
    hosts["node0"].files["results.tar"] = pack_output({"output/results.json": b"{"})

    with pytest.raises(JobError, match=r"results\.json: ") as caught:
        run(hosts, tmp_path)
    assert caught.value.hint == f"the whole log is {tmp_path / 'job/log'}"


def test_a_job_is_placed_started_followed_and_fetched(tmp_path: Path) -> None:
    hosts = make_hosts([event(event="phase", name="train"), "noise", event(**RESULT)])
    events: list[Any] = []

    result = run(hosts, tmp_path / "out", events)

    assert result == {"f1": 90.0}
    assert [e["event"] for e in events] == ["phase", "result"]
    assert (tmp_path / "out" / "job/log").read_text() == "log"
    line = mpirun_line(hosts["node0"])
    assert f"-ppn 1 -wdir {PATHS.root} -n 3 " in line
    assert "-genv MASTER_ADDR 172.31.0.10" in line
    assert '"backend": "gloo"' in line
    with tarfile.open(fileobj=io.BytesIO(hosts["node0"].files[PATHS.upload])) as tar:
        names = tar.getnames()
    assert f"{PATHS.relative_root}/code/worker/tasks/__main__.py" in names
    assert f"{PATHS.relative_root}/data/train.json" in names
    assert not any("__pycache__" in name for name in names)
    kept = json.loads((tmp_path / "out/job/job.json").read_text())
    assert (kept["job"], kept["kind"], kept["exit_code"]) == (PATHS.job_id, "squad", 0)
    assert kept["argv"][:4] == ["python", "-m", "worker.tasks", "squad"]
    assert SquadOptions.from_json(kept["argv"][4]).model == "scratch"
    assert kept["mpirun"].startswith("/opt/spr-cluster/venv/bin/mpirun -bootstrap slurm -ppn 1 ")
    assert (kept["state"], kept["seconds"], kept["stack"]) == ("succeeded", 7.5, "upstream")
    assert kept["ended"] == "2027-01-15T08:00:07+00:00"
    recovery = {"retries": 0, "least_nodes": 0}
    more = {"recipe": "fast", "results": str(tmp_path / "out"), "recovery": recovery}
    assert kept["more"] == more
    assert kept["placement"]["shares"][2] == [{"cpus": [0, 1], "workers": [], "numa": 0}]


def test_a_failure_with_a_checkpoint_names_the_resume_command(tmp_path: Path) -> None:
    cause = event(event="error", message="gone", hint=None, rank=1, host="b", lost_peer=False)
    hosts = make_hosts([cause], exit_code=1)
    hosts["node0"].answers[:0] = [("listing the jobs", listed(PATHS.job_id, "step-000040"))]

    with pytest.raises(JobError) as caught:
        run(hosts, tmp_path)
    assert str(caught.value.hint).startswith(
        f"the whole log is {tmp_path / 'job/log'}; checkpoint step-000040 is saved; to resume the job: "
        "spr-cluster train squad --resume"
    )


def test_a_cancelled_job_is_reported_as_cancelled(tmp_path: Path) -> None:
    """By another command, such as `cancel` in another terminal."""
    stopped = event(event="stopped", step=40, total=90, checkpoint="step-000040")
    hosts = make_hosts([stopped])
    hosts["node0"].answers[:0] = [
        ("listing the jobs", listed(PATHS.job_id, "step-000040")),
        ("cat .*/end.json", ended(state="cancelled", exit_code=143)),
    ]

    with pytest.raises(JobError, match=f"job {PATHS.job_id} was canceled") as caught:
        run(hosts, tmp_path)
    assert caught.value.hint == (
        "checkpoint step-000040 is saved; to resume the job: spr-cluster train squad --resume "
        f"{PATHS.job_id} --name bert --results {tmp_path}"
    )


def test_paths_are_translated_for_the_nodes(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    options = SquadOptions(model=str(model), data=str(tmp_path / "t.json"), eval="e.json")

    sent = options_on_nodes(options, load_stack("intel"))

    assert sent.model == "model"
    assert sent.data == "data/train.json"
    assert sent.eval == "data/eval.json"
    assert (sent.backend, sent.ipex) == ("ccl", True)
    assert options_on_nodes(SquadOptions(backend="gloo"), load_stack("intel")).backend == "gloo"
    assert data_files(options)["model"] == model
    request = TrainRequest(spec_of(options), tmp_path / "out")
    assert plan_training(request, load_stack("intel")).env[BASE_MODEL] == str(model)

    weighted = ClassifyOptions(data="t.csv", class_weights="w.json")
    there = options_on_nodes(weighted, load_stack("upstream")).class_weights
    assert data_files(weighted)[str(there)] == Path("w.json")
    chats = LmOptions(data="c.jsonl", chat_template="t.jinja")
    template = options_on_nodes(chats, load_stack("upstream")).chat_template
    assert data_files(chats)[str(template)] == Path("t.jinja")
    balanced = replace(weighted, class_weights="balanced")
    assert options_on_nodes(balanced, load_stack("upstream")).class_weights == "balanced"
    assert len(data_files(balanced)) == 1

    for name, there in ((str(model), "data/teacher"), ("scores.jsonl", "data/teacher.jsonl")):
        taught = ClassifyOptions(data="t.csv", teacher=name)
        assert options_on_nodes(taught, load_stack("upstream")).teacher == there
        assert data_files(taught)[there] == Path(name)
        assert needs_hub(taught), "for the student"
    taught = ClassifyOptions(data="t.csv", teacher=str(model), student_layers=2)
    assert "model" not in data_files(taught)
    assert not needs_hub(taught)
    assert needs_hub(replace(taught, teacher="org/teacher"))
    larger = EmbedOptions(data="t.csv", corpus="passages.txt")
    assert options_on_nodes(larger, load_stack("upstream")).corpus == "data/corpus.txt"


def test_a_path_with_a_dot_is_no_name_on_the_hub() -> None:
    words = ("train", "classify", "--data", "./reviews", "--teacher", "./t")
    options = parse_request(*words).read_options()
    assert local_data(options) == {"data": Path("reviews"), "teacher": Path("t")}
    options = parse_request(*words[:3], "reviews", "--teacher", "t").read_options()
    assert local_data(options) == {}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), {"placement", "batch_size"}),
        (("--ppn=2",), {"batch_size"}),
        (("--ccl-workers=2",), {"batch_size"}),
        (("--batch-size=8",), {"placement"}),
        (("--placement=reference",), set()),
        (("--placement", "auto"), set()),
        (("--cores", "2"), set()),
        (("--demo",), {"placement", "batch_size"}),
    ],
)
def test_tune_decides_what_the_user_leaves_open(flags: tuple[str, ...], expected: set[str]) -> None:
    request = build_request(parse_request("train", "squad", *flags), NOW)
    assert request.may_tune == expected


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    options = replace(DEMO, model=str(tmp_path))
    # Without a vocabulary, transformers makes a tokenizer for which every word is unknown.
    for name in ("config.json", "model.safetensors", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(UsageError, match="has no tokenizer, only the model") as refused:
        check_inputs(options)
    assert refused.value.hint == "save it beside the model: tokenizer.save_pretrained(folder)"
    for name in ("tokenizer.json", "vocab.txt", "spiece.model"):
        (tmp_path / name).write_text("")
        check_inputs(options)
        (tmp_path / name).unlink()
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UsageError, match="has only adapters") as refused:
        check_inputs(options)
    assert "predict --model" in str(refused.value.hint)


_ROBERTA = {"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1}


@pytest.mark.parametrize(
    ("words", "config", "why"),
    [
        ("lm --model", {"model_type": "bert", "architectures": ["BertModel"]}, "is BertModel, and"),
        ("lm --model", {"model_type": "xlm-roberta"}, "is xlm-roberta, and `train lm` needs a"),
        ("lm --model", {"model_type": "bert", "is_decoder": True}, ""),
        ("lm --model", {"model_type": "bert", "architectures": ["BertLMHeadModel"]}, ""),
        ("lm --model", {"model_type": "gpt2", "architectures": ["GPT2Model"]}, ""),
        ("classify --model", {"model_type": "bert", "architectures": ["BertModel"]}, ""),
        ("classify --teacher", {"architectures": ["BertModel"]}, "a teacher needs a classific"),
        ("classify --teacher", {"architectures": ["BertForSequenceClassification"]}, ""),
        ("embed --teacher", {"architectures": ["BertModel"]}, ""),
        ("lm --max-length 512 --model", {"n_positions": 256}, "512 is more than the 256 tokens of"),
        ("classify --max-length 513 --model", _ROBERTA, "513 is more than the 512 tokens of"),
        ("classify --max-length 512 --model", _ROBERTA, ""),
        ("classify --freeze-layers 7 --model", {"n_layers": 6}, "7 is more than the 6 layers of"),
        ("classify --freeze-layers 6 --model", {"n_layers": 6}, ""),
    ],
)
def test_a_model_of_another_kind_is_refused(
    tmp_path: Path, words: str, config: dict[str, Any], why: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "vocab.txt").write_text("")
    asked = build_request(parse_request("train", *words.split(), str(tmp_path), "--demo"), NOW)
    with pytest.raises(UsageError, match=why) if why else nullcontext():
        check_inputs(asked.options)
