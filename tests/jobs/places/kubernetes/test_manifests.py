"""Manifests: golden files, and the schemas of Kubernetes and of Kubeflow's custom resources."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import yaml
from jsonschema import ValidationError
from kubernetes_validate.utils import ValidationError as PodError
from kubernetes_validate.utils import validate

from jobs.places.kubernetes.manifests import AMX_LABEL, Manifest, render_yaml
from jobs.worker.runtime.events import mark_of
from tests.golden import check_golden, compare
from tests.jobs.places.kubernetes.rendering import CLAIMS, EVERY, KINDS, RECIPES, rendered
from tests.jobs.places.kubernetes.schemas import read_schemas

GOLDEN = Path(__file__).with_name("golden")
NEWEST = "1.33"


@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDEN.glob("*Job-*.yaml")))
def test_the_yaml_of_each_kind_recipe_and_stack(name: str) -> None:
    # A PyTorchJob's workers repeat its master.
    check_golden(GOLDEN / f"{name}.yaml", render_golden(name).partition("    Worker:\n")[0])


@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDEN.glob("*Job-*.diff")))
def test_how_the_yaml_of_another_stack_differs(name: str) -> None:
    base, text = map(render_golden, (f"{name.rpartition('-')[0]}-intel", name))

    check_golden(GOLDEN / f"{name}.diff", compare(base, text))


@pytest.mark.parametrize(("kind", "recipe"), [*product(KINDS, RECIPES)])
def test_claims_differ_only_where_they_should(kind: str, recipe: str) -> None:
    new, existing = (
        rendered(*RECIPES[recipe], "--kind", kind, *claim) for claim in CLAIMS.values()
    )

    assert new.claim is not None
    assert new.claim["spec"]["resources"]["requests"] == {"storage": "100Gi"}
    assert "storageClassName" not in new.claim["spec"], "the cluster's default"
    assert existing.manifests == [existing.job]
    text = existing.yaml_files()["job.yaml"]
    assert text.replace("claimName: data", "claimName: spr-cluster") == new.yaml_files()["job.yaml"]


def test_kubectl_reads_no_string_as_a_number_or_boolean() -> None:
    mark = mark_of("bert236")
    assert mark == "93288e84"
    assert f"value: '{mark}'\n" in rendered("--job-name", "bert236").yaml_files()["job.yaml"]
    words = "09876543 1e3 -1 -_1 +.5 .inf 0x1F 0o17 1_000 2026-11-30T01:02:03Z y N On ~ null"
    for text in words.split():
        assert render_yaml({text: text}, {}) == f"'{text}': '{text}'\n"
    for text in ("100Gi", "-m", "bert", "no-1", "2.0.1-cpu"):
        assert render_yaml({text: text}, {}) == f"{text}: {text}\n"


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_the_schemas_accept_every_job_claim_and_pod(words: tuple[str, ...]) -> None:
    found = rendered(*words)
    known = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "bert"}}
    pod: Manifest = {**known, "spec": pod_of(found.job)}

    for schema in read_schemas(found.job["kind"]):
        schema.validate(found.job)
        with pytest.raises(ValidationError):
            schema.validate({**found.job, "spec": {**found.job["spec"], "x": 1}})
    for document in (pod, *filter(None, [found.claim])):
        validate(document, NEWEST, strict=True)
    with pytest.raises(PodError):
        validate({**pod, "spec": {**pod["spec"], "x": 1}}, NEWEST, strict=True)
    # Comments do not change what is submitted, and workers repeat the master without them.
    text = found.yaml_files()
    assert [*map(yaml.safe_load, text.values())] == found.manifests
    if found.job["kind"] == "PyTorchJob":
        replicas = found.job["spec"]["pytorchReplicaSpecs"]
        assert replicas["Worker"] == {**replicas["Master"], "replicas": 3}
        assert "#" not in text["job.yaml"].partition("    Worker:\n")[2]


def test_a_pod_is_guaranteed_its_resources_and_never_root() -> None:
    for kind in KINDS:
        pod = pod_of(rendered("--kind", kind).job)
        (container,) = pod["containers"]

        assert container["resources"]["limits"] == container["resources"]["requests"]
        require_restricted(pod)
        assert pod.get("automountServiceAccountToken", True) is (kind == "TrainJob")
        assert pod["nodeSelector"] == {AMX_LABEL: "true"}
        assert "nodeSelector" not in pod_of(rendered("--kind", kind, "--node-selector", "any").job)
        own = pod_of(rendered("--kind", kind, "--node-selector", "a.com/pool=spr").job)
        assert own["nodeSelector"] == {AMX_LABEL: "true", "a.com/pool": "spr"}


def require_restricted(pod: Manifest) -> None:
    """Check the rules of https://kubernetes.io/docs/concepts/security/pod-security-standards/."""
    kinds = {key for each in pod["volumes"] for key in each}
    assert kinds <= {"name", "persistentVolumeClaim", "emptyDir"}
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }


def test_the_copy_pod_mounts_the_claim_and_is_restricted() -> None:
    found = rendered("--claim", "data", "--namespace", "ml", "--image", "me/spr:1")
    pod = yaml.safe_load(found.copy_yaml())

    validate(pod, NEWEST, strict=True)
    require_restricted(pod["spec"])
    assert pod["metadata"]["namespace"] == "ml"
    (container,), (volume,) = pod["spec"]["containers"], pod["spec"]["volumes"]
    assert container["image"] == "me/spr:1"
    assert volume["persistentVolumeClaim"]["claimName"] == "data"
    assert container["volumeMounts"] == [{"name": "workspace", "mountPath": "/workspace"}]
    # A namespace with a quota requires both.
    assert container["resources"].keys() == {"limits", "requests"}
    assert "nodeSelector" not in pod["spec"]
    # A new disk must be where the job's node is.
    disk = yaml.safe_load(rendered("--nodes", "1").copy_yaml())
    assert disk["spec"]["nodeSelector"] == {AMX_LABEL: "true"}


def test_a_pytorchjobs_size() -> None:
    policy = rendered("--kind", "PyTorchJob", "--nodes", "4").job["spec"]["runPolicy"]
    # All pods may restart three times; Training Operator counts them together.
    assert 3 * 4 < policy["backoffLimit"] <= 4 * 4
    # One node needs no worker and no shared storage.
    alone = rendered("--kind", "PyTorchJob", "--nodes", "1")
    assert [*alone.job["spec"]["pytorchReplicaSpecs"]] == ["Master"]
    assert alone.claim is not None
    assert alone.claim["spec"]["accessModes"] == ["ReadWriteOnce"]


def render_golden(name: str) -> str:
    """Return the manifests of ``TrainJob-fast-intel``: a kind, a recipe, and a stack."""
    kind, _, recipe = name.partition("-")
    found = rendered(*RECIPES[recipe], "--kind", kind, "--namespace", "training")
    return "---\n".join(found.yaml_files().values())


def pod_of(job: Manifest) -> Manifest:
    """The pod that an operator makes: for a TrainJob, the runtime's with our patch and trainer."""
    spec = job["spec"]
    if job["kind"] == "PyTorchJob":
        found: Manifest = spec["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
        return found
    trainer = spec["trainer"]
    (patch,) = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"][
        "replicatedJobs"
    ]
    pod = patch["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    own = {key: trainer[key] for key in ("image", "command", "args", "env")}
    return {**pod, "containers": [{**container, **own, "resources": trainer["resourcesPerNode"]}]}
