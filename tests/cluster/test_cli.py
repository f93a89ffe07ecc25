"""The command line: exit codes, one clear line for a mistake, and nothing done before it is judged."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError

import cluster.lifecycle
import infra.aws
from cluster.cli import main
from cluster.files import ClusterFiles, render_cloud_line
from infra.access import write_private
from infra.clients import Clients, translate_boto_error
from infra.cloud import Cloud
from infra.errors import CloudError, UsageError
from tests.cluster.test_lifecycle import Machines

SAMPLE = {
    "data": [
        {
            "title": "t",
            "paragraphs": [
                {
                    "context": "a b",
                    "qas": [
                        {"id": "q", "question": "?", "answers": [{"text": "b", "answer_start": 0}]}
                    ],
                }
            ],
        }
    ]
}


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    try:
        code = main(argv)
    except SystemExit as end:
        code = int(end.code or 0)
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.fixture
def on_aws(aws: Cloud, clients: Clients, monkeypatch: pytest.MonkeyPatch) -> Machines:
    """The command line against moto, with every node's SSH faked."""
    machines = Machines()
    monkeypatch.setattr(infra.aws, "find_caller_cidr", aws.caller_cidr)
    monkeypatch.setattr(cluster.lifecycle, "ssh_host", machines.make)
    return machines


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["up", "--nodes", "0"], "--nodes 0: expected a whole number from 1 to 256"),
        (["up", "--nodes", "two"], "argument --nodes: invalid int value: 'two'"),
        (["up", "--instance-type", "r7iz.metal"], "unknown instance type 'r7iz.metal'"),
        (["up", "--stack", "tensorflow"], "unknown stack 'tensorflow': one of intel, reference, upstream"),
        (["up", "--ttl", "forever"], "--ttl 'forever': expected a duration"),
        (["up", "--name", "My Cluster"], "--name My Cluster: expected lower-case"),
        (["up", "--cloud", "azure"], "argument --cloud: invalid choice: 'azure'"),
        (["up", "--region", "mars-1"], "unknown region 'mars-1'"),
        (["fly"], "invalid choice: 'fly'"),
        (["train", "bert"], "invalid choice: 'bert'"),
        (["train", "squad", "--data", "/nowhere.json"], "/nowhere.json"),
        (["train", "squad", "--epochs", "0"], "--epochs 0 is out of range: 1 to 10000"),
        (["train", "squad", "--ppn", "0"], "--ppn 0"),
        (["train", "squad", "--demo", "--model", "./nowhere"], "--model ./nowhere: no such folder"),
    ],
)
def test_a_mistake_is_answered_in_one_line_before_anything_is_asked_or_bought(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    code, out, err = run(capsys, *argv)

    assert code == 2
    assert message in err
    assert out == ""
    assert "Traceback" not in err


def test_a_wrong_record_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    path.write_text(json.dumps(SAMPLE))

    code, _, err = run(capsys, "train", "squad", "--data", str(path))

    assert code == 2
    assert f"{path}: data[0] 't', paragraphs[0], qas[0] (id 'q'): answer_start 0" in err


def test_buying_without_a_terminal_needs_yes(
    capsys: pytest.CaptureFixture[str], on_aws: Machines, clients: Clients
) -> None:
    code, _, err = run(capsys, "up", "--nodes", "4")

    assert code == 2
    assert "--yes" in err
    assert "$26.19 an hour" in err
    assert "At most $209.51" in err
    assert "256 vCPUs" in err
    assert clients.ec2.describe_instances()["Reservations"] == []


def test_up_status_and_down_on_aws(
    capsys: pytest.CaptureFixture[str], on_aws: Machines, clients: Clients
) -> None:
    code, out, err = run(capsys, "up", "--nodes", "2", "--yes", "--json")
    assert code == 0, err
    assert [node["name"] for node in json.loads(out)["nodes"]] == ["node0", "node1"]

    code, out, _ = run(capsys, "status")
    assert code == 0
    assert "2 of 2 nodes, stack intel" in out

    assert run(capsys, "down")[0] == 2
    code, out, err = run(capsys, "down", "--yes")
    assert code == 0, err
    assert out == "Nothing left of cluster spr.\n"
    code, out, _ = run(capsys, "status")
    assert "No cluster spr in aws us-east-1." in out


@pytest.mark.parametrize(("answer", "bought"), [("n", False), ("", False), ("y", True)])
def test_on_a_terminal_up_asks(
    capsys: pytest.CaptureFixture[str],
    on_aws: Machines,
    clients: Clients,
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    bought: bool,
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal(answer + "\n"))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)

    code, _, _ = run(capsys, "up", "--nodes", "1")

    assert code == (0 if bought else 2)
    assert bool(clients.ec2.describe_instances()["Reservations"]) is bought


def test_a_node_without_amx_fails_and_names_what_was_bought(
    capsys: pytest.CaptureFixture[str], on_aws: Machines
) -> None:
    on_aws.flags = "avx512f"

    code, _, err = run(capsys, "up", "--nodes", "2", "--yes")

    assert code == 1
    assert "[node0] no AMX" in err
    assert "--allow-no-amx" in err
    assert "spr-cluster down --name spr --cloud aws --region us-east-1" in err
    assert "It exists now, and costs money: 1 instances" in err


def test_no_credentials_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = run(capsys, "status")

    assert code == 2
    assert "no AWS credentials found" in err
    assert "--cloud local" in err


def test_no_permission_names_the_call(
    capsys: pytest.CaptureFixture[str], on_aws: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = "You are not authorized. Encoded authorization failure message: " + "x" * 500
    refusal = ClientError(
        {"Error": {"Code": "UnauthorizedOperation", "Message": message}}, "CreateSecurityGroup"
    )

    def refuse(*_: Any) -> str:
        raise refusal

    monkeypatch.setattr("infra.network.create_security_group", refuse)

    code, _, err = run(capsys, "up", "--yes")

    assert code == 1
    assert "no permission for CreateSecurityGroup: You are not authorized." in err
    assert "xxx" not in err
    assert "EC2 shows nothing of it now" in err


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (NoCredentialsError(), UsageError, "no AWS credentials"),
        (EndpointConnectionError(endpoint_url="https://ec2"), CloudError, "AWS can't be reached"),
        (
            ClientError({"Error": {"Code": "ExpiredToken", "Message": "old"}}, "X"),
            UsageError,
            "old",
        ),
        (
            ClientError({"Error": {"Code": "Oops", "Message": "hm"}}, "X"),
            CloudError,
            "X failed: Oops",
        ),
    ],
)
def test_errors_of_boto_become_ours(error: Exception, kind: type[Exception], text: str) -> None:
    translated = translate_boto_error(error)
    assert isinstance(translated, kind)
    assert text in str(translated)


def test_a_bug_keeps_its_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: str) -> None:
        raise RuntimeError("bug")

    monkeypatch.setattr("cluster.files.remembered_cloud", broken)
    with pytest.raises(RuntimeError, match="bug"):
        main(["status"])


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys)
    assert code == 2
    assert "spr-cluster up --nodes 4" in out


@pytest.mark.parametrize("verb", ["up", "train", "status", "ssh", "down", "local"])
def test_every_command_explains_itself_with_examples(
    capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    code, out, _ = run(capsys, verb, "--help")
    assert code == 0
    assert f"spr-cluster {verb}" in out.split("examples:")[-1]


def test_help_imports_nothing_heavy() -> None:
    heavy = ["boto3", "botocore", "fabric", "paramiko", "rich", "pydantic", "torch", "moto"]
    code = (
        "import sys; from cluster.cli import build_parser; build_parser().format_help(); "
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_reset_takes_the_keys_of_local_clusters_along_and_no_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, cloud in (("mine", "local"), ("bought", "aws")):
        files = ClusterFiles.of(name)
        write_private(files.key, "key")
        write_private(files.ssh_config, render_cloud_line(cloud, "us-east-1"))
    monkeypatch.setattr("infra.local.reset", lambda **_: None)
    monkeypatch.setattr("infra.local.cloud._has_podman", lambda: False)

    assert run(capsys, "local", "reset")[0] == 0
    assert not ClusterFiles.of("mine").folder.exists()
    assert ClusterFiles.of("bought").key.read_text() == "key"
