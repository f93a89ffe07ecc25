"""`train --to kubernetes-yaml`: what it prints, writes, and gives to kubectl, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.harness.command_line import CommandResult
from tests.jobs.cli.test_main import run

K8s = Callable[..., CommandResult]


@pytest.fixture
def render(capsys: pytest.CaptureFixture[str]) -> K8s:
    def act(task: str, *words: str) -> CommandResult:
        return run(capsys, "train", task, "--to", "kubernetes-yaml", *words)

    return act


RENDER = ("squad", "--nodes", "2", "--job-name", "bert")


def test_without_a_folder_it_prints_what_kubectl_takes(render: K8s) -> None:
    result = render(*RENDER)

    assert (result.code, result.err) == (0, "")
    claim, job = yaml.safe_load_all(result.out)
    assert (claim["kind"], job["kind"]) == ("PersistentVolumeClaim", "TrainJob")
    assert job["metadata"]["name"] == "bert"
    yaml_, _, comments = result.out.partition("# With this in job.yaml:\n")
    assert "kubectl" not in yaml_
    label = "jobset.sigs.k8s.io/jobset-name=bert"
    assert comments.splitlines() == [
        "# kubectl create -f job.yaml  # with the claim; for later jobs, --claim spr-cluster omits it",
        f"# kubectl get pods -l {label}",
        f"# kubectl logs -f --tail=-1 -l {label},batch.kubernetes.io/job-completion-index=0",
        "# kubectl create -f copy.yaml  # a pod with the claim; --output writes it",
        "# kubectl wait --for=condition=Ready --timeout=10m pod/copy",
        "# kubectl cp copy:/workspace/jobs/bert/output results/bert",
        "# kubectl cp copy:/workspace/jobs/bert/output.state/metrics results/bert/job/metrics",
        "# kubectl cp copy:/workspace/jobs/bert/output.state/logs results/bert/job/logs",
        "# spr-cluster report results/bert",
        "# kubectl delete -f copy.yaml",
        # Not by the file, which also has the claim.
        "# kubectl delete trainjob bert",
    ]
    published = render(*RENDER, "--recipe", "reference").out
    assert "output.state/logs results/bert/job/logs\n# kubectl delete" in published, "no report"
    assert "metrics" not in published


def test_json_has_the_same_manifests_and_their_numbers(render: K8s) -> None:
    shown = [*yaml.safe_load_all(render(*RENDER, "--stack", "intel").out)]
    found = json.loads(render(*RENDER, "--stack", "intel", "--json").out)

    assert found["manifests"] == shown
    numbers = found["nproc_per_node"], found["omp_threads"], found["ccl_workers"], found["cpus"]
    assert numbers == (1, 30, 1, 62)
    assert found["dockerfile"].startswith("# The image of stack intel")


def test_with_a_folder_it_writes_all_that_the_image_needs(render: K8s, tmp_path: Path) -> None:
    folder = tmp_path / "it's here"
    result = render(*RENDER, "--image", "me/spr:1", "--output", str(folder))

    assert (result.code, result.err) == (0, "")
    quoted = f"{tmp_path}/it'\"'\"'s here"
    assert f"docker build --tag me/spr:1 '{quoted}' && docker push me/spr:1\n" in result.out
    claim = f"kubectl get pvc spr-cluster || kubectl create -f '{quoted}/claim.yaml'"
    assert f"  {claim}\n  kubectl create -f '{quoted}/job.yaml'\n" in result.out
    assert result.out.endswith(f"kubectl delete -f '{quoted}/job.yaml'\n")
    names = {path.name for path in folder.iterdir()}
    assert names == {
        *["Dockerfile", "requirements.txt", "code", "claim.yaml", "job.yaml", "copy.yaml"]
    }
    assert (folder / "code/worker/tasks/__main__.py").is_file()
    assert (folder / "code/worker/tasks/squad/sample.json").is_file()
    # Once more, with other options: nothing of the first time is left.
    (folder / "code/worker/old.py").touch()
    again = render(*RENDER, "--claim", "data", "--output", str(folder))
    assert again.code == 0
    assert f"--tag spr-cluster:upstream '{quoted}'  # on each node; for a reg" in again.out
    assert {path.name for path in folder.iterdir()} == names - {"claim.yaml"}
    assert not (folder / "code/worker/old.py").exists()


def test_a_dry_run_writes_nothing(render: K8s, tmp_path: Path) -> None:
    result = render(*RENDER, "--dry-run", "--output", str(tmp_path / "build"))

    assert result.code == 0, result.err
    assert result.out == (
        "TrainJob bert: 2 pods of 62 CPUs and 460 GiB, each with 1 rank of 31 threads; image "
        "spr-cluster:upstream; new claim spr-cluster\n"
    )
    assert not (tmp_path / "build").exists()


_KUBECTL = """\
#!/bin/sh
echo "$*" >> {folder}/calls
case "$*" in
  "config current-context") echo lab;;
  "get pvc"*) cat {folder}/claims;;
  *--dry-run=server*)
    cat > {folder}/tried
    [ ! -e {folder}/refused ] || {{ cat {folder}/refused >&2; exit 1; }};;
  "create "*) cat > {folder}/created; echo trainjob.trainer.kubeflow.org/bert created;;
esac
"""


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what kubectl was called with; a stand-in for it is the only program."""
    folder = tmp_path / "kubectl-calls"
    folder.mkdir()
    (folder / "claims").touch()
    program = tmp_path / "bin" / "kubectl"
    program.parent.mkdir()
    program.write_text(_KUBECTL.format(folder=folder))
    program.chmod(0o755)
    for name in ("sh", "cat"):
        (program.parent / name).symlink_to(f"/bin/{name}")
    monkeypatch.setenv("PATH", str(program.parent))
    return folder


def kinds(file: Path) -> list[str]:
    return [each["kind"] for each in yaml.safe_load_all(file.read_text())]


APPLY = (*RENDER, "--namespace", "ml", "--apply")


def test_kubectl_creates_the_claim_and_the_job(render: K8s, kubectl: Path) -> None:
    result = render(*APPLY, "--yes", "--report-to", "wandb")

    assert result.code == 0, result.err
    how = "omit --apply, and add it to env in job.yaml, from a secret: {name: WANDB_API_KEY, valueF"
    assert f"--report-to wandb needs WANDB_API_KEY or WANDB_MODE=offline: {how}" in result.err
    assert "2 pods of 62 CPUs and 460 GiB" in result.err
    assert result.out.splitlines() == [
        "trainjob.trainer.kubeflow.org/bert created",
        "  kubectl -n ml get pods -l jobset.sigs.k8s.io/jobset-name=bert",
        "  kubectl -n ml logs -f --tail=-1 -l jobset.sigs.k8s.io/jobset-name=bert,"
        "batch.kubernetes.io/job-completion-index=0",
    ]
    assert (kubectl / "calls").read_text().splitlines() == [
        "config current-context",
        "get pvc spr-cluster --ignore-not-found "
        "--output=jsonpath={.spec.accessModes}{.status.accessModes} --namespace ml",
        "create --dry-run=server -f -",
        "create -f -",
    ]
    assert (kubectl / "created").read_text() == (kubectl / "tried").read_text()
    shown = render(*APPLY[:-1], "--report-to", "wandb").out.partition("# With this in")[0]
    assert [*yaml.safe_load_all((kubectl / "created").read_text())] == [*yaml.safe_load_all(shown)]


@pytest.mark.parametrize(
    ("modes", "nodes", "warns"),
    [
        ('["ReadWriteMany"]', "2", False),
        ('["ReadWriteOnce"]["ReadWriteOnce"]', "2", True),
        ('["ReadWriteOnce"]["ReadWriteOnce"]', "1", False),
    ],
)
def test_an_existing_claim_is_used(
    render: K8s, kubectl: Path, modes: str, nodes: str, *, warns: bool
) -> None:
    (kubectl / "claims").write_text(modes)
    result = render(*APPLY, "--yes", "--json", "--nodes", nodes)

    assert (result.code, "; existing claim spr-cluster\n" in result.err) == (0, True)
    assert [each["kind"] for each in json.loads(result.out)["manifests"]] == ["TrainJob"]
    warning = "warning: claim spr-cluster is not ReadWriteMany: unless its storage"
    assert (warning in result.err) is warns
    assert kinds(kubectl / "created") == ["TrainJob"]


def test_a_dry_run_lets_the_cluster_validate_and_creates_nothing(
    render: K8s, kubectl: Path
) -> None:
    result = render(*APPLY, "--dry-run", "--json")

    assert result.code == 0, result.err
    assert json.loads(result.out)["created"] is False
    assert kinds(kubectl / "tried") == ["PersistentVolumeClaim", "TrainJob"]
    assert not (kubectl / "created").exists()


@pytest.mark.parametrize(
    ("words", "file", "code", "said"),
    [
        (("--yes",), "refused", 1, "spr-cluster: kubectl create: Error from server: bert exists"),
        ((), "tried", 2, "there is no terminal: in context lab\n  → --yes confirms"),
        (
            ("--yes", "--claim", "data"),
            "tried",
            2,
            "spr-cluster: claim data doesn't exist\n  → without --claim",
        ),
        (("--yes",), "bin", 2, "spr-cluster: --apply: kubectl is not installed here\n  → "),
    ],
)
def test_what_is_refused_creates_nothing(
    render: K8s, kubectl: Path, words: tuple[str, ...], file: str, code: int, said: str
) -> None:
    if file == "refused":
        text = "E1127 14:16:19 a.go] x\nError from server:\n bert exists\n"
        (kubectl / "refused").write_text(text)
    elif file == "bin":
        (kubectl.parent / "bin/kubectl").unlink()
    result = render(*APPLY, *words)

    assert (result.code, result.out) == (code, "")
    assert said in result.err
    assert (kubectl / "tried").exists() is (file == "refused")
    assert not (kubectl / "created").exists()
