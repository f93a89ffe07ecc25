"""``spr-cluster run``."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from cluster.cli.ssh import NOT_CONNECTED, run_client
from cluster.console.display import format_seconds, paused
from cluster.console.options import CLUSTER, argument, option, switch
from cluster.console.output import emit, has_terminal, say
from cluster.console.parser import Parser, add_request
from infra.errors import UsageError
from infra.words import counted
from jobs.cli.places.dry_run import run_dry
from jobs.cli.places.options import DryRunRequest, check_place
from jobs.cli.shared.chosen_job import open_job_context
from jobs.cli.shared.job_options import (
    PlacementRequest,
    QueueRequest,
    ResultsRequest,
    VariableRequest,
)
from jobs.cli.shared.when_done import OnCluster, follow_to_end
from jobs.places.folders import has_rsync
from jobs.places.plan import PackageList
from jobs.places.queue.job_output import Event
from jobs.places.queue.session import JobContext, run_job
from jobs.places.record import JobRecord
from jobs.program.array import read_array
from jobs.program.folder import (
    SentFolders,
    choose_folders,
    describe_left_out,
    read_urls,
    replace_links,
)
from jobs.program.packages import UnreadListError, find_packages
from jobs.program.plan import (
    MAX_BYTES,
    ProgramRequest,
    collect_files,
    find_script,
    plan_program,
)
from jobs.program.pyproject import OwnPackage, may_run_python, needs_packages, read_own_package
from jobs.train.request import check_results
from jobs.worker.spec import JobSpec, Work
from jobs.worker.training.options import is_url
from provision.install import VENV

_PROGRAM: dict[str, Any] = {"section": "program"}


@dataclass(frozen=True, kw_only=True)
class RunCommand(DryRunRequest, QueueRequest, PlacementRequest, ResultsRequest, VariableRequest):
    """Run a program in every rank, placed and pinned like `train`. The nodes receive the project: the
    folder of spr-cluster.toml or of the git repository, as git sees it and without what .sprignore
    lists; only what changed is sent. Every rank has torch's RANK, WORLD_SIZE, LOCAL_RANK,
    MASTER_ADDR, and MASTER_PORT. What it writes to the folder $SPR_OUTPUT is fetched; that of
    each worker goes to a folder named after the node. New and changed files in the working folder
    are fetched to work/NODE. With --array, the elements take turns on the ranks: each has
    $SPR_ARRAY_INDEX, and its own $SPR_OUTPUT and log.

    examples:
      spr-cluster run -- hostname                 once per rank
      spr-cluster run --nodes 2 --ppn 2 -- python my_script.py --epochs 3
      spr-cluster run --env HF_TOKEN --data-dir data -- python src/main.py
      spr-cluster run --data s3://my-data/images -- python train.py images
      spr-cluster run --array 1-100%8 -- python work.py --seed '$SPR_ARRAY_INDEX'
      spr-cluster run --pty -- ipython            on this terminal, on one node
      spr-cluster run finetune                    a job in spr-cluster.toml
      spr-cluster run finetune -- --epochs 5      with more arguments
    """

    program: tuple[str, ...] = argument(
        "the program and its arguments, after --", takes="+", metavar="PROGRAM"
    )
    folder: str | None = option(
        "the folder to send and to start in, instead of the project and the working folder; `none` "
        "sends only the command's script and --files",
        metavar="DIR",
        **_PROGRAM,
    )
    files: tuple[str, ...] = option(
        "another file or folder that the program needs, such as one that git ignores; repeatable",
        (),
        repeats=True,
        metavar="PATH",
        **_PROGRAM,
    )
    data_dir: tuple[str, ...] = option(
        "folder of data, sent once and shared by all jobs, at its place in the project; or s3://…, which "
        "each node downloads once, under its last part's name; repeatable",
        (),
        flags=("--data-dir", "--data"),
        repeats=True,
        metavar="DIR",
        **_PROGRAM,
    )
    packages: str | None = option(
        "what to install beside the stack: a uv.lock, pyproject.toml, requirements file, or script with "
        "a header, in the working folder, else in the project; pyproject.toml[train] adds an extra or "
        "group; `none` for nothing (default: the script's header, else the project's first of these)",
        metavar="FILE",
        **_PROGRAM,
    )
    output_dir: str | None = option(
        "folder in the working folder that the program writes and that is fetched, like $SPR_OUTPUT",
        metavar="DIR",
        **_PROGRAM,
    )
    outputs: tuple[str, ...] | None = option(
        "files of the project's folder to fetch, such as 'out/**', or with ! not to fetch, instead of all "
        "new and changed ones up to 1 GiB a node; '' for none; repeatable",
        repeats=True,
        if_empty=("",),
        metavar="PATTERN",
        **_PROGRAM,
    )
    own_torch: bool = switch("let the packages replace the stack's torch", **_PROGRAM)
    pty: bool = switch(
        "run it on this terminal, on one node: a shell, pdb, or IPython; it ends with the connection",
        **_PROGRAM,
    )
    array: str | None = option(
        "run it once per element, each on one rank's cores: 1-100, 1-100%8 (at most 8 at a time), 3,17, "
        "FILE.csv (a row's columns are variables), or FILE.csv:3,17",
        metavar="ELEMENTS",
        **_PROGRAM,
    )
    large_files: bool = switch("allow more than 256 MiB besides the data", **_PROGRAM)
    backend: str = option(
        "communication backend of the ranks; ccl reserves cores (default: the stack's)",
        "auto",
        choices=("auto", "ccl", "gloo"),
        section="placement",
    )


def add_parser(parent: Parser) -> None:
    add_request(parent, "run", run, RunCommand)


def run(request: RunCommand) -> int:
    now = datetime.now(timezone.utc)
    if request.to != CLUSTER:
        raise UsageError(
            f"--to {request.to}: only tasks can run there: spr-cluster train TASK --to {request.to}"
        )
    check_place(request)
    results = request.results_folder("run", now)
    if request.dry_run:
        dry = build_request(request, results)
        planned = run_dry(
            request, request.resources.nodes, now, lambda target: plan_program(dry, target.stack)
        )
        emit(request, *planned)
        return 0
    return follow_to_end(
        request, lambda on_cluster: _run(request, now, results, on_cluster), detach=request.detach
    )


def _run(request: RunCommand, now: datetime, results: Path, on_cluster: OnCluster) -> int:
    with ThreadPoolExecutor(1) as pool:
        # The project is read while EC2 answers; what is wrong with it is reported first.
        reading = pool.submit(build_request, request, results)
        try:
            context = open_job_context(request, now, on_cluster=on_cluster)
        finally:
            program = reading.result()
    plan = plan_program(program, context.stack)
    if request.pty:
        context = replace(context, on_event=partial(_open_terminal, context))
    done = run_job(context, lambda _: plan).record
    emit(request, render(done, program.results), asdict(done))
    return 0


def _open_terminal(context: JobContext, event: Event) -> None:
    """Once the job runs, give its program this terminal until it ends."""
    if event["event"] != "running":
        context.on_event(event)
        return
    node = context.cluster.node(event["node"]).name
    start = f"exec env PYTHONPATH=code {VENV}/bin/python -m worker.program.terminal"
    command = f"cd {shlex.quote(event['folder'])} && {start}"
    argv = ["ssh", "-t", "-q", "-F", str(context.find_ssh_config()), node, command]
    with paused(context.progress):
        if run_client(argv) == NOT_CONNECTED:
            say(f"the connection to {node} broke; the program ends as soon as {node} notices")


def build_request(request: RunCommand, results: Path) -> ProgramRequest:
    """Return the options as a request. Raises :class:`UsageError` for invalid ones."""
    # A program's other words may be empty.
    for name, words in (("program", request.program[:1]), ("--files", request.files)):
        if "" in words:
            raise UsageError(f"{name}: a word is empty")
    for each in request.outputs or ():
        if each.startswith("/") or ".." in each.split("/"):
            raise UsageError(
                f"--outputs {each!r} is outside of the program's folder",
                hint="write into the folder, or into $SPR_OUTPUT, which is always fetched",
            )
    if request.array is not None:
        refuse_array(request)
    if request.pty:
        refuse_pty(request)
    variables = request.read_variables()
    check_results(results)
    here, folder = Path.cwd(), request.folder
    given = request.array
    array = None if given is None else read_array(given, here, request.program)
    data = [each for each in request.data_dir if not is_url(each)]
    if not has_rsync() and not data and folder is None:
        say("rsync is not installed here: only the command's script and --files are sent")
        folder = "none"
    sent = choose_folders(folder, data, here, None if request.large_files else MAX_BYTES)
    own = read_own_package(sent.project.root) if sent.project else OwnPackage()
    start = sent.project.root / sent.subfolder if sent.project else here
    large = request.large_files
    project, named = sent.project, request.files
    files = collect_files(request.program, named, here, project, start, data=sent.data, large=large)
    sent = replace_links(sent, files.files)
    if folder != "none" and (note := describe_left_out(sent, files.files, here)):
        say(note)
    packages = _read_packages(request, sent, own, start)
    if request.own_torch and packages is None:
        raise UsageError(
            "--own-torch has no effect: the program has no packages to install",
            hint="name a list with --packages, or omit it",
        )
    if packages:
        imports = (f"work/{each}".removesuffix("/.") for each in packages.imports)
        own = replace(own, imports=tuple(dict.fromkeys((*own.imports, *imports))))
    return ProgramRequest(
        _build_spec(request, read_urls([each for each in request.data_dir if is_url(each)], sent)),
        files=files,
        folders=sent.folders,
        packages=packages,
        own=own,
        output_dir=read_output_dir(request.output_dir, sent, files.files),
        outputs=None if request.outputs is None else tuple(filter(None, request.outputs)),
        subfolder=sent.subfolder,
        results=results,
        env=variables,
        backend="gloo" if array else request.backend,
        is_interactive=request.pty,
        array=array,
    )


def _build_spec(request: RunCommand, stage: tuple[tuple[str, str], ...]) -> JobSpec:
    resources = request.resources
    if request.pty:
        # The default depends on the nodes.
        placement = replace(resources.placement, nproc_per_node=1)
        resources = replace(resources, nodes=1, placement=placement)
    spec = request.spec(Work(program=request.program), resources)
    return replace(spec, storage=replace(spec.storage, stage=stage))


def _read_packages(
    request: RunCommand, sent: SentFolders, own: OwnPackage, start: Path
) -> PackageList | None:
    """Return the packages that the program needs: of `--packages`, its script's header, or its project."""
    root, given = sent.project.root if sent.project else start, request.packages
    script = find_script(request.program, start, root)
    if given is None and not sent.project:
        given = str(start / script) if script and script.endswith(".py") else "none"
    elif given is None and not needs_packages(request.program, own.scripts):
        return None
    try:
        packages = find_packages(given, root, start / script if script else None, Path.cwd())
    except UnreadListError as error:
        if may_run_python(request.program, own.scripts):
            raise
        say(f"no packages are installed: {error.message}")
        return None
    if packages and packages.imports and not sent.project:
        raise UsageError(
            f"{packages.source} lists folders, and no folder is sent",
            hint="`--folder .` sends this one",
        )
    if packages and request.own_torch:
        say("--own-torch: without the stack's oneCCL and IPEX, and its tested match with mpirun")
        packages = replace(packages, own_torch=True)
    return packages


def refuse_array(request: RunCommand) -> None:
    """Raise :class:`UsageError` for options that have no effect on elements of an array."""
    given = {"--pty": request.pty, "--output-dir": bool(request.output_dir)}
    given |= {"--backend": request.backend != "auto"}
    if refused := [flag for flag, is_given in given.items() if is_given]:
        raise UsageError(f"--array runs separate programs: omit {' and '.join(refused)}")


def refuse_pty(request: RunCommand) -> None:
    """Raise :class:`UsageError` if ``--pty`` can't work with the other options or without a terminal."""
    if request.sink is not None:
        raise UsageError("pty: not in Python", hint="spr-cluster run --pty")
    given = {"--nodes": request.nodes not in (None, 1), "--ppn": request.ppn not in (None, 1)}
    given |= {"--retries": bool(request.retries), "--detach": request.detach}
    given |= {"--json": request.json, "--placement": request.placement == "reference"}
    if refused := [flag for flag, is_given in given.items() if is_given]:
        raise UsageError(f"--pty runs one rank on this terminal: omit {' and '.join(refused)}")
    if not has_terminal():
        raise UsageError("--pty needs a terminal", hint="omit it, or run the command in a terminal")
    if not shutil.which("ssh"):
        raise UsageError("--pty needs ssh on this machine", hint="install the OpenSSH client")


def read_output_dir(given: str | None, sent: SentFolders, files: Iterable[str]) -> str:
    """Return the folder that becomes a link. Raises :class:`UsageError` if it is sent or elsewhere."""
    if given is None:
        return ""
    path = os.path.normpath(given)
    place = os.path.normpath(f"{sent.subfolder}/{path}")
    names = [*files, *(sent.project.names or () if sent.project else ())]
    data = [each.target.removeprefix("work/") for each in sent.folders if each.shared]
    if path.startswith(("/", "..")) or path == ".":
        raise UsageError(f"--output-dir {given}: expected a folder in the working folder")
    if any(f"{name}/".startswith(f"{place}/") for name in names):
        raise UsageError(
            f"--output-dir {given} contains files that are sent", hint="list it in .sprignore"
        )
    if any(f"{a}/".startswith(f"{b}/") for each in data for a, b in ((each, place), (place, each))):
        raise UsageError(f"--output-dir {given} overlaps with --data-dir")
    return path


def render(done: JobRecord, folder: Path) -> str:
    """Return the result in a few lines."""
    nodes = len(done.nodes)
    ranks = nodes * done.placement.nproc_per_node
    return (
        f"{counted(ranks, 'rank')} on {counted(nodes, 'node')}, {format_seconds(done.seconds or 0.0)}\n"
        f"output, log, and job.json: {folder}/"
    )
