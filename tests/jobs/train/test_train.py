"""Submitting, following, and explaining a job, with SSH faked."""

from __future__ import annotations

import argparse
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from infra.errors import HostError, JobError, UsageError
from jobs.cli.train import add_parser
from jobs.cli.train_requests import build_request
from jobs.launch.plan import PlacementOptions
from jobs.train.request import TrainRequest, check_inputs, data_files, options_on_nodes
from jobs.train.train import train
from jobs.worker.squad.options import DEMO, TrainOptions
from provision.stacks.load import load_stack
from tests.fakes import FakeHost
from tests.jobs.context import (
    NOW,
    PATHS,
    RESULT,
    event,
    job_context,
    listed,
    make_hosts,
    pack_output,
)


def run(
    hosts: dict[str, FakeHost],
    results: Path,
    events: list[Any] | None = None,
    log: list[str] | None = None,
    placement: PlacementOptions | None = None,
) -> Any:
    return train(
        job_context(hosts, events=events, log=log),
        TrainRequest(DEMO, results, placement or PlacementOptions()),
    )


@pytest.mark.parametrize(
    "text",
    ["", "{", "3", "[]", "\x00\udcff", "[" * 10**5],
    ids=["empty", "cut off", "number", "list", "bytes", "deep"],
)
def test_damaged_results_are_one_line(tmp_path: Path, text: str) -> None:
    hosts = make_hosts([event(**RESULT)])
    hosts["node0"].files[f"{PATHS.root}/output.tar"] = pack_output(
        {"output/results.json": text.encode(errors="surrogateescape")}
    )

    with pytest.raises(JobError, match=r"results\.json: ") as caught:
        run(hosts, tmp_path)
    assert caught.value.hint == f"the whole log is {tmp_path / 'log'}"


def test_a_job_is_placed_started_followed_and_fetched(tmp_path: Path) -> None:
    hosts = make_hosts([event(event="phase", name="train"), "noise", event(**RESULT)])
    events: list[Any] = []

    result = run(hosts, tmp_path / "out", events)

    assert result == {"f1": 90.0}
    assert [e["event"] for e in events] == ["phase", "result"]
    assert (tmp_path / "out" / "log").read_text() == "log"
    script = hosts["node0"].files[PATHS.new_script].decode()
    assert "-n 3 -ppn 1" in script
    assert "-genv MASTER_ADDR 172.31.0.10" in script
    assert "--backend=gloo" in script
    with tarfile.open(fileobj=io.BytesIO(hosts["node0"].files[PATHS.upload])) as tar:
        names = tar.getnames()
    assert f"{PATHS.relative_root}/code/worker/squad/__main__.py" in names
    assert f"{PATHS.relative_root}/data/train.json" in names
    assert not any("__pycache__" in name for name in names)


def test_the_root_cause_is_reported_not_a_lost_peer(tmp_path: Path) -> None:
    lost = event(event="error", message="peer gone", hint=None, rank=0, host="a", lost_peer=True)
    cause = event(event="error", message="NaN", hint="lower it", rank=1, host="b", lost_peer=False)

    with pytest.raises(JobError, match="rank 1 on b: NaN") as caught:
        run(make_hosts([lost, cause], exit_code=1), tmp_path)
    assert caught.value.hint == f"lower it; the whole log is {tmp_path / 'log'}"


def test_a_failure_with_a_checkpoint_names_the_resume_command(tmp_path: Path) -> None:
    cause = event(event="error", message="gone", hint=None, rank=1, host="b", lost_peer=False)
    hosts = make_hosts([cause], exit_code=1)
    hosts["node0"].answers[:0] = [("listing the jobs", listed(PATHS.job_id, "step-000040"))]

    with pytest.raises(JobError) as caught:
        run(hosts, tmp_path)
    assert str(caught.value.hint).startswith(
        f"the whole log is {tmp_path / 'log'}; checkpoint step-000040 is saved; to resume the job: "
        "spr-cluster train squad --resume"
    )


def test_a_failure_without_an_event_is_explained_by_the_last_line(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="exit code 127: bash: mpirun: no such file"):
        run(make_hosts(["bash: mpirun: no such file", ""], exit_code=127), tmp_path)


def interrupted(*more: tuple[str, Any]) -> dict[str, FakeHost]:
    """Nodes whose job meets Ctrl-C while it is followed."""

    def interrupt(_: str) -> str:
        raise KeyboardInterrupt

    hosts = make_hosts([])
    hosts["node0"].answers[:0] = [("tail -n \\+1 -F", interrupt), *more]
    return hosts


def test_ctrl_c_warns_if_the_job_may_still_run(tmp_path: Path) -> None:
    hosts = interrupted(("# ending a job", HostError("node0", "no SSH at 192.0.2.1")))
    with pytest.raises(JobError) as caught:
        run(hosts, tmp_path)
    assert caught.value.message == (
        f"job {PATHS.job_id} may still be running and costing money: [node0] no SSH at 192.0.2.1"
    )
    assert "once the head is reachable: spr-cluster cancel --name bert, or" in str(
        caught.value.hint
    )


def test_a_closed_terminal_still_stops_the_job(tmp_path: Path) -> None:
    listing = ("listing the jobs", listed(PATHS.job_id, ""))
    hosts = interrupted(("# ending a job", ""), listing)

    class Closed(list[str]):
        def append(self, line: str) -> None:
            if not line.startswith("$"):
                raise OSError(5, "Input/output error")

    with pytest.raises(KeyboardInterrupt):
        run(hosts, tmp_path, log=Closed())
    assert any("# ending a job" in command for command in hosts["node0"].commands)


def test_ctrl_c_stops_the_job_on_all_nodes(tmp_path: Path) -> None:
    log = list[str]()
    hosts = interrupted(
        ("# ending a job", ""), ("listing the jobs", listed(PATHS.job_id, "step-000040"))
    )

    with pytest.raises(KeyboardInterrupt):
        run(hosts, tmp_path, log=log)
    assert f"d=~/spr-jobs/{PATHS.job_id}\n" in hosts["node0"].commands[-2]
    assert log[-3:-1] == [
        "saving a checkpoint and stopping; press Ctrl-C again to stop immediately",
        "Job stopped on all nodes",
    ]
    assert log[-1] == (
        "checkpoint step-000040 is saved; to resume the job: spr-cluster train squad --resume "
        f"{PATHS.job_id} --name bert --results {tmp_path}"
    )


def test_a_second_ctrl_c_does_not_wait_for_the_checkpoint(tmp_path: Path) -> None:
    def interrupt(_: str) -> str:
        raise KeyboardInterrupt

    hosts, log = make_hosts([]), list[str]()
    hosts["node0"].answers[:0] = [
        ("tail -n \\+1 -F", interrupt),
        (r"# ending a job(.|\n)*seq 600\)", interrupt),
        (r"# ending a job(.|\n)*seq 0\)", ""),
        ("listing the jobs", listed(PATHS.job_id, "")),
    ]

    with pytest.raises(KeyboardInterrupt):
        run(hosts, tmp_path, log=log)
    assert "seq 0" in hosts["node0"].commands[-2]
    assert log[-1].startswith("there is no checkpoint yet; to resume the job: spr-cluster train")


def test_a_stopped_job_is_reported_as_stopped(tmp_path: Path) -> None:
    stopped = event(event="stopped", step=40, total=90, checkpoint="step-000040")
    hosts = make_hosts([stopped], exit_code=143)
    hosts["node0"].answers[:0] = [("listing the jobs", listed(PATHS.job_id, "step-000040"))]

    with pytest.raises(JobError, match=f"job {PATHS.job_id} was stopped") as caught:
        run(hosts, tmp_path)
    assert f"--resume {PATHS.job_id}" in str(caught.value.hint)


def test_a_second_job_is_refused_while_one_runs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="job squad-1 is still running"):
        run(make_hosts([], busy="squad-1"), tmp_path)


def test_paths_are_translated_for_the_nodes(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    options = TrainOptions(model=str(model), data=str(tmp_path / "t.json"), eval="e.json")

    sent = options_on_nodes(options, load_stack("intel"))

    assert sent.model == "model"
    assert sent.data == "data/train.json"
    assert sent.eval == "data/eval.json"
    assert (sent.backend, sent.ipex) == ("ccl", True)
    assert options_on_nodes(TrainOptions(backend="gloo"), load_stack("intel")).backend == "gloo"
    assert data_files(options)["model"] == model


def test_the_published_placement_warns_before_it_starts(tmp_path: Path) -> None:
    hosts = make_hosts([event(**RESULT)])
    log: list[str] = []

    run(hosts, tmp_path, log=log, placement=PlacementOptions("reference"))

    assert [line.startswith("warning: ") for line in log] == [True] * 4 + [False]
    assert "node2 is oversubscribed: 48 busy threads on 2 cores" in log[3]
    assert "-n 6 -ppn 2" in log[4]


def test_placement_options_are_read() -> None:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())

    def placement(*flags: str) -> PlacementOptions:
        request = build_request(parser.parse_args(["train", "squad", *flags]), NOW)
        assert isinstance(request, TrainRequest)
        return request.placement

    assert placement() == PlacementOptions("auto", None, None)
    asked = ("--ppn=2", "--ccl-workers=3")
    assert placement(*asked) == PlacementOptions("auto", 2, 3)
    assert placement("--placement=reference").mode == "reference"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), {"placement", "batch_size"}),
        (("--ppn=2",), {"batch_size"}),
        (("--ccl-workers=2",), {"batch_size"}),
        (("--batch-size=8",), {"placement"}),
        (("--placement=reference",), set()),
        (("--no-tuned",), set()),
        (("--demo",), {"placement", "batch_size"}),
    ],
)
def test_tune_decides_what_the_user_leaves_open(flags: tuple[str, ...], expected: set[str]) -> None:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    request = build_request(parser.parse_args(["train", "squad", *flags]), NOW)
    assert request.may_tune == expected


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a model folder, because it has no config"):
        check_inputs(TrainOptions(model=str(tmp_path)))


def test_a_record_of_the_job_is_kept_with_its_results(tmp_path: Path) -> None:
    run(make_hosts([event(**RESULT)]), tmp_path)

    kept = json.loads((tmp_path / "job.json").read_text())
    assert (kept["job"], kept["kind"], kept["exit_code"]) == (PATHS.job_id, "squad", 0)
    assert kept["argv"][:4] == ["python", "-m", "worker.squad", "--model=scratch"]
    assert kept["mpirun"].startswith("/opt/spr-cluster/venv/bin/mpirun -f /home/ubuntu/hosts -n 3 ")
    assert (kept["stack"], kept["more"]) == ("upstream", {"recipe": "fast"})
    assert kept["placement"]["shares"][2] == [{"cpus": [0, 1], "workers": [], "numa": 0}]


def test_a_failed_job_has_its_record_too(tmp_path: Path) -> None:
    with pytest.raises(JobError):
        run(make_hosts(["no"], exit_code=9), tmp_path)
    assert json.loads((tmp_path / "job.json").read_text())["exit_code"] == 9


def test_training_can_use_the_first_nodes_only(tmp_path: Path) -> None:
    hosts = make_hosts([event(**RESULT)])
    train(job_context(hosts), TrainRequest(DEMO, tmp_path, nodes=1))
    assert "-n 1 -ppn 1" in hosts["node0"].files[PATHS.new_script].decode()
    assert hosts["node1"].commands == hosts["node2"].commands == []
