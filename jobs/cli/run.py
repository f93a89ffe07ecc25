"""``spr-cluster run``."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

from cluster.cli.chosen_cluster import add_cluster_options
from cluster.cli.ssh import NOT_CONNECTED, run_client
from cluster.console.display import format_seconds, paused
from cluster.console.output import emit, has_terminal, say
from cluster.console.parser import SubParsers, add_command
from infra.errors import UsageError
from infra.words import counted
from jobs.cli.places.dry_run import run_dry
from jobs.cli.places.options import CLUSTER, add_dry_run_options, check_place
from jobs.cli.shared.chosen_job import add_results_option, open_job_context
from jobs.cli.shared.job_options import (
    add_max_time,
    add_placement_options,
    add_queue_options,
    add_variable_options,
    detachable,
    read_placement,
    read_variable_options,
    results_folder,
)
from jobs.launchers.folders import has_rsync
from jobs.launchers.queue.job_output import Event
from jobs.launchers.queue.session import JobContext, run_job
from jobs.launchers.record import JobRecord
from jobs.program.folder import SentFolders, choose_folders, describe_left_out, read_urls
from jobs.program.packages import OwnPackage, find_packages, read_own_package, runs_python
from jobs.program.plan import (
    MAX_BYTES,
    ProgramRequest,
    collect_files,
    find_script,
    plan_program,
)
from jobs.train.request import check_results
from jobs.worker.training.options import is_url
from provision.install import VENV

_EXAMPLES = """\
  spr-cluster run -- hostname                 once per rank
  spr-cluster run --nodes 2 --ppn 2 -- python my_script.py --epochs 3
  spr-cluster run --env HF_TOKEN --data-dir data -- python src/main.py
  spr-cluster run --data s3://my-data/images -- python train.py images
  spr-cluster run --pty -- ipython            on this terminal, on one node
  spr-cluster run finetune                    a job in spr-cluster.toml
  spr-cluster run finetune -- --epochs 5      with more arguments
"""


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "run",
        "Run a program in every rank, placed and pinned like `train`. The nodes receive the project: the\n"
        "folder of spr-cluster.toml or of the git repository, as git sees it and without what .sprignore\n"
        "lists; only what changed is sent. Every rank has torch's RANK, WORLD_SIZE, LOCAL_RANK,\n"
        "MASTER_ADDR, and MASTER_PORT. What it writes to the folder $SPR_OUTPUT is fetched; that of\n"
        "each worker goes to a folder named after the node. New and changed files in the working folder\n"
        "are fetched to work/NODE.",
        _EXAMPLES,
        run=detachable(run),
    )
    add_cluster_options(parser)
    add_dry_run_options(parser, "; only `train` can write it for other places")
    add_placement_options(parser.add_argument_group("placement"))
    queue = parser.add_argument_group("queue")
    add_queue_options(queue, retries=0)
    add_max_time(queue)
    group = parser.add_argument_group("program")
    add = group.add_argument
    add(
        "--folder",
        metavar="DIR",
        help="the folder to send and to start in, instead of the project and the working folder; `none` "
        "sends only the command's script and --files",
    )
    add(
        "--files",
        action="append",
        default=[],
        metavar="PATH",
        help="another file or folder that the program needs, such as one that git ignores; repeatable",
    )
    add(
        "--data-dir",
        "--data",
        action="append",
        default=[],
        metavar="DIR",
        help="folder of data, sent once and shared by all jobs, at its place in the project; or s3://…, "
        "which each node downloads once, under its last part's name; repeatable",
    )
    add(
        "--packages",
        metavar="FILE",
        help="what to install beside the stack: a uv.lock, pyproject.toml, requirements file, or script with "
        "a header; pyproject.toml[train] adds an extra or group; `none` for nothing (default: the script's "
        "header, else the project's first of these)",
    )
    add(
        "--output-dir",
        metavar="DIR",
        help="folder in the working folder that the program writes and that is fetched, like $SPR_OUTPUT",
    )
    add(
        "--outputs",
        action="append",
        metavar="PATTERN",
        help="files of the project's folder to fetch, such as 'out/**', or with ! not to fetch, instead of "
        "all new and changed ones up to 1 GiB a node; '' for none; repeatable",
    )
    add("--own-torch", action="store_true", help="let the packages replace the stack's torch")
    add(
        "--pty",
        action="store_true",
        help="run it on this terminal, on one node: a shell, pdb, or IPython; it ends with the connection",
    )
    add("--large-files", action="store_true", help="allow more than 256 MiB besides the data")
    add_variable_options(add)
    add_results_option(group, "the output")
    parser.hide_from_help(("instance_type", "stack"))
    parser.add_argument(
        "program", nargs="+", metavar="PROGRAM", help="the program and its arguments, after --"
    )


def run(args: argparse.Namespace) -> int:
    now = datetime.now(timezone.utc)
    if args.to != CLUSTER:
        raise UsageError(
            f"--to {args.to}: only tasks can run there: spr-cluster train TASK --to {args.to}"
        )
    check_place(vars(args))
    results = results_folder(args, "run", now)
    if args.dry_run:
        dry = build_request(args, results)
        emit(args, *run_dry(args, now, lambda target: plan_program(dry, target.stack)))
        return 0
    with ThreadPoolExecutor(1) as pool:
        # The project is read while EC2 answers; what is wrong with it is reported first.
        reading = pool.submit(build_request, args, results)
        try:
            context = open_job_context(args, now)
        finally:
            request = reading.result()
    plan = plan_program(request, context.stack)
    if args.pty:
        context = replace(context, on_event=partial(_open_terminal, context))
    done = run_job(context, lambda _: plan).record
    emit(args, render(done, request.results), asdict(done))
    return 0


def _open_terminal(context: JobContext, event: Event) -> None:
    """Once the job runs, give its program this terminal until it ends."""
    if event["event"] != "running":
        context.on_event(event)
        return
    node = context.cluster.node(event["node"]).name
    start = f"exec env PYTHONPATH=code {VENV}/bin/python -m worker.program.terminal"
    command = f"cd {shlex.quote(event['folder'])} && {start}"
    argv = ["ssh", "-t", "-q", "-F", str(context.ssh_config), node, command]
    with paused(context.progress):
        if run_client(argv) == NOT_CONNECTED:
            say(f"the connection to {node} broke; the program ends as soon as {node} notices")


def build_request(args: argparse.Namespace, results: Path) -> ProgramRequest:
    """Return the options as a request. Raises :class:`UsageError` for invalid ones."""
    for flag in ("program", "files"):
        if "" in getattr(args, flag):
            raise UsageError(f"{flag if flag == 'program' else '--files'}: a word is empty")
    if args.pty:
        refuse_pty(args)
    variables = read_variable_options(args)
    check_results(results)
    here, folder = Path.cwd(), args.folder
    data = [each for each in args.data_dir if not is_url(each)]
    if not has_rsync() and not data and folder is None:
        say("rsync is not installed here: only the command's script and --files are sent")
        folder = "none"
    max_bytes = None if args.large_files else MAX_BYTES
    sent = choose_folders(folder, data, here, max_bytes)
    placement = read_placement(args)
    if args.pty:
        placement = replace(placement, nproc_per_node=1)  # the default depends on the nodes
    packages, own = None, OwnPackage()
    if sent.project:
        own = read_own_package(sent.project.root)
    start = sent.project.root / sent.subfolder if sent.project else here
    large = args.large_files
    files = collect_files(args.program, args.files, here, sent.project, start, large=large)
    if note := describe_left_out(sent, files.files):
        say(note)
    if sent.project and (args.packages or runs_python(args.program, own.scripts)):
        script = find_script(args.program, start, sent.project.root)
        packages = find_packages(
            args.packages, sent.project.root, start / script if script else None
        )
    if packages:
        imports = (f"work/{each}".removesuffix("/.") for each in packages.imports)
        own = replace(own, imports=tuple(dict.fromkeys((*own.imports, *imports))))
    if packages and args.own_torch:
        say("--own-torch: without the stack's oneCCL and IPEX, and its tested match with mpirun")
        packages = replace(packages, own_torch=True)
    return ProgramRequest(
        command=tuple(args.program),
        files=files,
        folders=sent.folders,
        stage=read_urls([each for each in args.data_dir if is_url(each)], sent),
        packages=packages,
        own=own,
        output_dir=read_output_dir(args.output_dir, sent, files.files),
        outputs=None if args.outputs is None else tuple(filter(None, args.outputs)),
        subfolder=sent.subfolder,
        results=results,
        placement=placement,
        nodes=1 if args.pty else args.nodes,
        env=variables,
        backend=args.backend,
        retries=args.retries,
        is_interactive=args.pty,
    )


def refuse_pty(args: argparse.Namespace) -> None:
    """Raise :class:`UsageError` if ``--pty`` can't work with the other options or without a terminal."""
    given = {"--nodes": args.nodes not in (None, 1), "--ppn": args.ppn not in (None, 1)}
    given |= {"--retries": args.retries > 0, "--detach": args.detach, "--json": args.json}
    given |= {"--placement": args.placement == "reference"}
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
