"""A training job as YAML for Kubernetes: printed, written into a folder, or created by kubectl."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

from cluster.console.output import confirm, say
from infra.errors import SprError, UsageError
from infra.words import counted
from jobs.cli.places.folder import Result, check_output_folder, write_files
from jobs.cli.places.options import ANY, KUBERNETES, PlaceRequest
from jobs.places.kubernetes.manifests import AMX_LABEL, Rendered
from jobs.places.kubernetes.request import JOB_KINDS, TRAIN_JOB, PodOptions
from jobs.places.placement import NodeShape
from jobs.worker.runtime.output import LOGS, METRICS
from jobs.worker.training.options import flag

# Names of pods and services add a suffix, with at most 63 characters in total.
_NAME = r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?"
# https://kubernetes.io/docs/concepts/overview/working-with-objects/names/
_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_OBJECT = r"(?=.{1,253}$)[a-z0-9]([a-z0-9.-]*[a-z0-9])?"
# https://github.com/distribution/reference
_IMAGE = r"[a-zA-Z0-9][a-zA-Z0-9._:/@-]{0,499}"
_FORMS = {
    "job_name": (_NAME, "lower-case letters, digits, and dashes, at most 40, first a letter"),
    "namespace": (_LABEL, "lower-case letters, digits, and dashes, at most 63"),
    "image": (_IMAGE, "REPOSITORY/NAME:TAG"),
    "claim": (_OBJECT, "a claim's name"),
}
# A line of kubectl's own log, such as "E1127 14:16:19.642687 1655 memcache.go:265] …".
_LOG = re.compile(r"[EWI]\d{4} ")
LOGIN = (
    "add it to env in job.yaml, from a secret: "
    "{{name: {key}, valueFrom: {{secretKeyRef: {{name: SECRET, key: {key}}}}}}}"
)
"""What a user does for a variable with a login."""
# A claim's modes, and those of its volume, if it has one.
_MODES, _SHARED = "--output=jsonpath={.spec.accessModes}{.status.accessModes}", "ReadWriteMany"
_NO_REGISTRY = "  # on each node; for a registry: --image REGISTRY/NAME"
_FILES = ("Dockerfile", "requirements.txt", "job.yaml", "code")


def read_pods(request: PlaceRequest, nodes: int | None, name: str, stack: str) -> PodOptions:
    """Return the pods for the options. Raises :class:`UsageError` for invalid ones."""
    for option, (form, wanted) in _FORMS.items():
        value = getattr(request, option)
        if value is not None and not re.fullmatch(form, value, re.ASCII):
            raise UsageError(f"{flag(option)} {value!r}: expected {wanted}")
    if nodes is None:
        raise UsageError(f"--to {KUBERNETES} needs --nodes, the number of pods")
    amx = {} if ANY in request.node_selector else {AMX_LABEL: "true"}
    own = (label.split("=") for label in request.node_selector if label != ANY)
    return PodOptions(
        name=name,
        nodes=nodes,
        image=request.image or f"spr-cluster:{stack}",
        kind=JOB_KINDS[request.kind] if request.kind else TRAIN_JOB,
        namespace=request.namespace,
        claim=request.claim,
        shape=request.find_shape() or NodeShape(),
        node_labels={**amx, **dict(own)},
    )


def write(rendered: Rendered, output: str | None) -> Result:
    """Write a job's files into a folder; without one, return its YAML, which kubectl accepts."""
    if output is None:
        lines = [f"# {line}".rstrip() for line in ["With this in job.yaml:", *_next(rendered)]]
        yaml_ = "---\n".join(rendered.yaml_files().values())
        return "\n".join([yaml_.rstrip("\n"), *lines]), describe(rendered)
    folder = check_output_folder(output, _FILES, KUBERNETES)
    # It may be left from an earlier rendering.
    (folder / "claim.yaml").unlink(missing_ok=True)
    yaml = {name: text.encode() for name, text in rendered.yaml_files().items()}
    copy = {"copy.yaml": rendered.copy_yaml().encode()}
    write_files({**rendered.build, **yaml, **copy}, folder)
    image, name = shlex.quote(rendered.pods.image), shlex.quote(str(folder))
    pushed = f" && docker push {image}" if "/" in rendered.pods.image else _NO_REGISTRY
    lines = [
        f"Dockerfile, code, and YAML of job {rendered.pods.name}: {folder}/\n",
        f"  docker build --tag {image} {name}{pushed}",
        *(f"  {line}" for line in _next(rendered, folder)),
    ]
    return "\n".join(lines), describe(rendered, folder)


def _next(rendered: Rendered, folder: Path | None = None) -> list[str]:
    """Return the commands from a job's files to its results and its end."""
    pods, kubectl = rendered.pods, _prefix(rendered)
    names = ("claim.yaml", "job.yaml", "copy.yaml")
    claim, job, copy = (shlex.quote(str((folder or Path()) / name)) for name in names)
    creates = [f"{kubectl} create -f {job}"]
    # Without a folder, the claim is in the job's file. Not `apply`: most of a claim's fields can't change.
    if rendered.claim and not folder:
        creates[0] += f"  # with the claim; for later jobs, --claim {pods.claim_name} omits it"
    elif rendered.claim:
        creates.insert(0, f"{kubectl} get pvc {pods.claim_name} || {kubectl} create -f {claim}")
    own = f"results/{pods.name}"
    # Transformers' script has no metrics of ours, and `report` can't read its results.
    ours = () if rendered.is_reference else (METRICS,)
    return [
        *creates,
        *_watch(rendered),
        f"{kubectl} create -f {copy}  # a pod with the claim; --output writes it",
        f"{kubectl} wait --for=condition=Ready --timeout=10m pod/copy",
        f"{kubectl} cp copy:{pods.output} {own}",
        *(f"{kubectl} cp copy:{pods.state}/{each} {own}/job/{each}" for each in (*ours, LOGS)),
        *(f"spr-cluster report {own}" for _ in ours),
        f"{kubectl} delete -f {copy}",
        # The claim must outlive the job.
        f"{kubectl} delete " + (f"-f {job}" if folder else f"{pods.kind.name.lower()} {pods.name}"),
    ]


def _prefix(rendered: Rendered) -> str:
    namespace = rendered.pods.namespace
    return f"kubectl -n {namespace}" if namespace else "kubectl"


def _watch(rendered: Rendered) -> list[str]:
    pods, kubectl = rendered.pods, _prefix(rendered)
    label = f"{pods.kind.pod_label}={pods.name}"
    first = f"{pods.name}-master-0"
    if pods.kind == TRAIN_JOB:
        first = f"--tail=-1 -l {label},batch.kubernetes.io/job-completion-index=0"
    return [f"{kubectl} get pods -l {label}", f"{kubectl} logs -f {first}"]


def describe(rendered: Rendered, folder: Path | None = None) -> dict[str, object]:
    """Return the job for ``--json``."""
    placement, size = rendered.placement, rendered.size
    return {
        "job": rendered.pods.name,
        "output": str(folder) if folder else None,
        "nodes": rendered.pods.nodes,
        "nproc_per_node": placement.nproc_per_node,
        "omp_threads": placement.omp_threads,
        "ccl_workers": placement.ccl_workers,
        "cpus": size.cpus,
        "memory_gib": size.memory_gib,
        "manifests": rendered.manifests,
        "dockerfile": rendered.dockerfile,
    }


def summarize(rendered: Rendered) -> str:
    """Return the job in a line: its pods, their ranks, and its claim."""
    pods, placement, size = rendered.pods, rendered.placement, rendered.size
    ranks = counted(placement.nproc_per_node, "rank")
    claim = "new" if rendered.claim else "existing"
    return (
        f"{pods.kind.name} {pods.name}: {counted(pods.nodes, 'pod')} of {size.cpus} CPUs and "
        f"{size.memory_gib} GiB, each with {ranks} of {counted(placement.omp_threads, 'thread')}; "
        f"image {pods.image}; {claim} claim {pods.claim_name}"
    )


def apply(rendered: Rendered, *, yes: bool, dry_run: bool) -> Result:
    """Create a job through kubectl; with ``dry_run``, the cluster only validates it.

    A job that the cluster refuses leaves no claim behind. Raises :class:`UsageError` without kubectl, and for
    a claim that is missing.
    """
    if not shutil.which("kubectl"):
        hint = "install it, or omit --apply and give the YAML to `kubectl create -f -` elsewhere"
        raise UsageError("--apply: kubectl is not installed here", hint=hint)
    context, name = _kubectl("config", "current-context").strip(), rendered.pods.claim_name
    namespace = rendered.pods.namespace
    where = ("--namespace", namespace) if namespace else ()
    modes = _kubectl("get", "pvc", name, "--ignore-not-found", _MODES, *where)
    if not modes and rendered.claim is None:
        raise UsageError(f"claim {name} doesn't exist", hint="without --claim, a new one is made")
    if modes and _SHARED not in modes and rendered.pods.nodes > 1:
        say(
            f"warning: claim {name} is not {_SHARED}: unless its storage serves several nodes anyway, as NFS "
            "does, only pods on one node can start"
        )
    rendered = replace(rendered, claim=None) if modes else rendered
    say(summarize(rendered))
    if not dry_run:
        confirm(f"Create it in context {context}?", yes=yes, about=f"in context {context}")
    yaml = "---\n".join(rendered.yaml_files().values())
    _kubectl("create", "--dry-run=server", "-f", "-", stdin=yaml)
    if dry_run:
        text = f"The cluster accepts job {rendered.pods.name}; nothing was created."
        return text, {**describe(rendered), "created": False}
    created = _kubectl("create", "-f", "-", stdin=yaml)
    lines = [created.rstrip("\n"), *(f"  {line}" for line in _watch(rendered))]
    return "\n".join(lines), {**describe(rendered), "created": True}


def _kubectl(*words: str, stdin: str = "") -> str:
    """Return what kubectl prints. Raises :class:`SprError` with its message if it fails."""
    argv = ["kubectl", *words]
    done = subprocess.run(argv, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if not _LOG.match(line)]
        why = " ".join(lines) or f"exit code {done.returncode}"
        raise SprError(f"kubectl {words[0]}: {why}", hint=f"the command was: {shlex.join(argv)}")
    return done.stdout
