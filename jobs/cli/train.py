"""``spr-cluster train``: one subcommand per task; squad also offers the published recipe."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from cluster.console.options import CLUSTER, EVERYWHERE, option, positive_int, switch
from cluster.console.output import emit, say
from cluster.console.parser import Parser, add_command
from infra.errors import UsageError
from jobs.cli.places import kubernetes, slurm
from jobs.cli.places.dry_run import Target, run_dry
from jobs.cli.places.options import KUBERNETES, PlaceRequest, check_place
from jobs.cli.results.fetch import PushRequest, open_push_target, push
from jobs.cli.shared.chosen_job import open_job_context
from jobs.cli.shared.job_display import render_result
from jobs.cli.shared.job_options import (
    PlacementRequest,
    QueueRequest,
    ResultsRequest,
    TaskRequest,
    VariableRequest,
    task_options,
)
from jobs.cli.shared.placement_table import as_rows, render_speeds
from jobs.cli.shared.when_done import OnCluster, follow_to_end
from jobs.experiments.placement_study import study_placement
from jobs.places.kubernetes.manifests import Rendered, render
from jobs.places.plan import JobPlan, new_job_id
from jobs.places.queue.session import JobContext
from jobs.places.record import read_job_id
from jobs.places.script.script import SlurmScript
from jobs.reference.plan import (
    PRESETS,
    ReferenceRequest,
    check_script,
    plan_reference,
    train_reference,
)
from jobs.train.elsewhere import plan_for_script, plan_in_pods, plan_reference_in_pods
from jobs.train.request import (
    TrainRequest,
    change_options,
    check_inputs,
    check_results,
    check_writable,
    expand_home,
    require_able_stack,
    spec_of,
)
from jobs.train.resume import ResumeRequest, parse_stored_job, resume
from jobs.train.study import DEFAULT_TRIALS, PLACEMENT, is_placement, parse_tune, plan_study
from jobs.train.trackers import HUB_TOKEN, tracker_needs, tracker_variables
from jobs.train.train import plan_training, train
from jobs.worker.spec import Resources, Storage
from jobs.worker.spec import Work as JobWork
from jobs.worker.study.plan import Domain
from jobs.worker.tasks import TASKS
from jobs.worker.training.options import HUB, MAY_CHANGE, flag
from provision.stacks.compatibility import runs_tasks
from provision.stacks.load import DEFAULT_STACK, load_stack
from provision.stacks.stack import Stack

_EXAMPLES = """\
  spr-cluster train squad                  DistilBERT on SQuAD
  spr-cluster train classify --data texts.csv --eval-fraction 0.1
  spr-cluster train classify --model org/m --data texts.csv --env HF_TOKEN
  spr-cluster train tag --data train.conll --eval dev.conll
  spr-cluster train score --data pairs.csv --pair-column sentence2
  spr-cluster train embed --data pairs.jsonl --eval-fraction 0.1
  spr-cluster train lm --data texts.txt --eval-fraction 0.1 --lora
  spr-cluster train classify --data s3://my-data/train.parquet
  spr-cluster study squad --tune epochs=1..3          train with --tune
  spr-cluster train digits                 does this cluster train? no data
  spr-cluster train squad --dry-run --instance-type r7iz.metal-16xl
  spr-cluster train squad --to kubernetes-yaml --nodes 4 --output build
  spr-cluster train squad --to slurm-script --nodes 4 --shape cores=64
"""
_TASK_EXAMPLES = """\
  spr-cluster train {task} --data train.csv --eval-fraction 0.2
  spr-cluster train {task} --data train.jsonl --eval dev.jsonl --seed 7
  spr-cluster train {task} --demo        small model, small sample
  spr-cluster train {task} --resume      the last unfinished job
  spr-cluster train {task} --resume s3://mine/{task}-20260731-142501-k3f
  spr-cluster study {task} --data train.csv --eval dev.csv --tune epochs=2,4
  spr-cluster train {task} --to slurm-script --nodes 2 --shape cores=8
"""
_SQUAD_EXAMPLES = """\
  spr-cluster train squad               DistilBERT on SQuAD
  spr-cluster train squad --data train.json --eval dev.json --model ./mine
  spr-cluster train squad --demo        small model, small sample
  spr-cluster train squad --resume      the last unfinished job
  spr-cluster train squad --resume s3://mine/squad-20260731-142501-k3f
  spr-cluster study squad --tune epochs=1..3          train with --tune
  spr-cluster train squad --recipe reference --smoke
  spr-cluster train squad --to slurm-script --nodes 2 --shape cores=8 --demo
  spr-cluster train squad --to kubernetes-yaml --nodes 4 --image me/spr:1
"""
_REPOSITORY = re.compile(rf"{HUB}(?!.*(--|\.\.))\w([\w.-]*\w)?/\w([\w.-]*\w)?", re.ASCII)
_RECIPES = ("fast", "reference")
Work = TrainRequest | ReferenceRequest | ResumeRequest
_SQUAD = (
    "Fine-tune a question answering model with PyTorch DDP on all nodes, evaluate it with\n"
    "SQuAD's exact match and F1, and fetch the model and results."
)
RETRIES = 1
LAST = "the last unfinished one"
# Options that may change on resume, besides those that do not affect what is learned.
_RESUME_MAY_CHANGE = MAY_CHANGE | {"checkpoint_every", "keep_checkpoints", "report_to"}


@dataclass(frozen=True, kw_only=True)
class TrainCommand(
    PlaceRequest,
    QueueRequest,
    PlacementRequest,
    TaskRequest,
    PushRequest,
    ResultsRequest,
    VariableRequest,
):
    """The options of `train`."""

    resume: str | None = option(
        "continue an interrupted job from its last checkpoint, with its own options; also one of "
        "another cluster, by its URL in that cluster's bucket (default: the last unfinished one)",
        takes="?",
        const=LAST,
        metavar="JOB",
    )
    elastic: int | None = option(
        "after the loss of a node, continue with at least MIN nodes and the same features per step, "
        "instead of waiting for `repair`",
        parse=positive_int,
        metavar="MIN",
        section="queue",
    )
    tune: tuple[str, ...] = option(
        "train many trials side by side, each on one rank's cores, and keep the best model. VALUES: a list "
        "(8,16,32) or a range (1e-5..1e-3:log). `placement` or `nodes` compares speeds instead; repeatable",
        (),
        repeats=True,
        metavar="NAME=VALUES",
        section="study",
    )
    trials: int | None = option(
        f"number of trials (default: all combinations, or {DEFAULT_TRIALS} with a range)",
        parse=positive_int,
        metavar="N",
        section="study",
        needs="--tune",
    )
    recipe: str = "fast"
    preset: str | None = None
    smoke: bool = False
    run_qa: str | None = None

    push_to: str | None = option(
        "also store the model: in S3, in a folder named after the job, with this machine's AWS "
        "credentials; or on the hub, from the nodes, private if it is new, with the login of "
        "--env HF_TOKEN",
        metavar="s3://BUCKET/PREFIX|hub:ORG/NAME",
    )

    @property
    def is_new(self) -> bool:
        return self.resume is None

    @property
    def on_hub(self) -> str | None:
        """The place of ``--push-to`` on the hub. Raises :class:`UsageError` for an impossible one."""
        if self.push_to is None or not self.push_to.startswith(HUB):
            return None
        problem = ""
        if self.resume is not None:
            problem = "a resumed job keeps its own"
        elif self.recipe == "reference":
            problem = "not with --recipe reference"
        elif not _REPOSITORY.fullmatch(self.push_to):
            problem = "expected hub:ORG/NAME, of letters, digits, '-', '_', and '.'"
        elif not any(re.match(f"{HUB_TOKEN}=.", word) for word in self.read_variables()):
            problem = "needs your login: add --env HF_TOKEN"
        if problem:
            raise UsageError(f"--push-to {self.push_to}: {problem}")
        return self.push_to

    @property
    def pushes(self) -> bool:
        return self.push_to is not None and self.on_hub is None

    @property
    def may_tune(self) -> frozenset[str]:
        """The values that the user left to the result of `--tune placement`."""
        if self.placement != "tuned" or self.cores:
            return frozenset()
        chosen = "batch_size" in self.given or self.preset
        batch_size = set() if chosen else {"batch_size"}
        placement = set() if self.ppn or self.ccl_workers else {"placement"}
        return frozenset(batch_size | placement)


@dataclass(frozen=True, kw_only=True)
class SquadCommand(TrainCommand):
    """The options of `train squad`."""

    recipe: str = option(
        "fast: this tool's own; reference: transformers' run_qa.py with the published flags and "
        "placement, and no other options (default: fast)",
        "fast",
        choices=_RECIPES,
        section="recipe",
        places=(CLUSTER, KUBERNETES),
    )
    preset: str | None = option(
        "published model, batch size, learning rate, and epochs (default with --recipe reference: "
        "distilbert; with --to kubernetes-yaml, bert-large)",
        choices=tuple(PRESETS),
        section="recipe",
        places=EVERYWHERE,
    )
    smoke: bool = switch(
        "recipe reference: run for a minute on one node, to check that nothing is missing",
        section="recipe",
        needs="--recipe reference",
    )
    run_qa: str | None = option(
        "recipe reference: local folder with run_qa.py (default: the stack's, on the nodes)",
        metavar="DIR",
        section="recipe",
        needs="--recipe reference",
        for_experts=True,
        places=(CLUSTER, KUBERNETES),
    )


def add_parser(parent: Parser) -> None:
    parser = add_command(
        parent,
        "train",
        "Train with PyTorch DDP on all nodes of a cluster, and fetch the results.",
        _EXAMPLES,
    )
    parser.expect("JOB", "jobs")
    for task, each in TASKS.items():
        is_squad = task == "squad"
        about = (
            f"Train a model with PyTorch DDP on all nodes: {each.help}. Evaluate it, and fetch\n"
        )
        about = _SQUAD if is_squad else about + "the model and results."
        examples = _SQUAD_EXAMPLES if is_squad else _TASK_EXAMPLES.replace("{task}", task)
        if not hasattr(each.Options, "data"):
            lines = examples.splitlines(keepends=True)
            examples = "".join(line for line in lines if "--data" not in line)
        options = SquadCommand if is_squad else TrainCommand
        add_command(parser, task, about, examples, each.help, run, options, task_options(task))


def run(request: TrainCommand) -> int:
    now = datetime.now(timezone.utc)
    check_place(request)
    if request.tune and is_placement(_read_tune(request)):
        return _compare_speeds(request, now)
    if request.to != CLUSTER or request.dry_run:
        emit(request, *_write_elsewhere(request, now))
        return 0
    return follow_to_end(
        request, lambda on_cluster: _run(request, now, on_cluster), detach=request.detach
    )


def _read_tune(request: TrainCommand) -> dict[str, Domain]:
    """Return what ``--tune`` varies. Raises :class:`UsageError`."""
    found = parse_tune(request.tune, request.read_options(request.preset))
    for name in found:
        if name in request.given or (name in PLACEMENT and getattr(request, name)):
            raise UsageError(f"{flag(name)}: --tune varies it", hint="omit one of the two")
    if request.resume is not None or request.recipe == "reference":
        other = "--resume" if request.resume is not None else "--recipe reference"
        raise UsageError(f"--tune: not with {other}, which has its own options")
    if not is_placement(found) and request.on_hub:
        raise UsageError(
            "--push-to hub: not with --tune", hint="send the best model later: hf upload"
        )
    return found


def _compare_speeds(request: TrainCommand, now: datetime) -> int:
    """Run a study of the placement."""
    names = (
        *("trials", "detach", "dry_run", "elastic", "retries", "bucket", "max_time", "budget"),
        *("results", "push_to", "down_when_done", "on_finish"),
    )
    # Those of spr-cluster.toml are for the job itself.
    typed = {word.partition("=")[0] for word in request.words}
    for name in names:
        if flag(name) in typed:
            raise UsageError(f"{flag(name)}: not with a study that compares speeds")
    own = [each for each in fields(request) if each.name in names]
    unset: dict[str, Any] = {each.name: each.default for each in own}
    request = replace(request, **unset)
    if request.placement == "reference":
        raise UsageError("--placement reference: its numbers are fixed")
    if request.cores:
        raise UsageError("--cores: not with a study that compares speeds, which takes whole nodes")
    wanted = build_request(request, now)
    check_inputs(wanted.options)
    context = open_job_context(request, now)
    study = study_placement(context, wanted, _read_tune(request))
    lines = render_speeds(study, context.cloud.usd_per_hour)
    emit(request, lambda: "\n".join(lines), as_rows(study))
    return 0


def _run(request: TrainCommand, now: datetime, on_cluster: OnCluster) -> int:
    work = _build_work(request, now)
    target = None if request.on_hub else open_push_target(request.push_to)
    context = open_job_context(request, now, show_cost=True, on_cluster=on_cluster)
    work = follow_stack(request, work, context.stack, now)
    result, folder = _train(context, work)
    if not request.json:
        print(render_result(result, folder), flush=True)
    pushed = push(target, folder, read_job_id(folder), context.progress, context.cluster.flags)
    pushed = pushed or result.get("pushed_to")
    emit(request, pushed or "", {**result, "pushed_to": pushed} if pushed else result)
    return 0


def _write_elsewhere(request: TrainCommand, now: datetime) -> tuple[str, dict[str, object]]:
    """Return the job as it is printed, after writing or creating it if the user asked for that."""
    if request.to == CLUSTER:
        work = _build_work(request, now)
        if isinstance(work, ResumeRequest):
            raise UsageError("--dry-run: a resumed job's options are on its nodes: omit --resume")
        stack = "reference" if request.recipe == "reference" else DEFAULT_STACK

        def plan(target: Target) -> JobPlan:
            return _plan_dry(request, work, target, now)

        return run_dry(request, request.resources.nodes, now, plan, stack)
    if request.to == KUBERNETES:
        pods = render_pods(request, now)
        for warning in pods.placement.warnings:
            say(f"warning: {warning}")
        how = f"omit --apply, and {kubernetes.LOGIN}" if request.apply else kubernetes.LOGIN
        _tell_needs(request, how)
        if request.apply:
            return kubernetes.apply(pods, yes=request.yes, dry_run=request.dry_run)
        if request.dry_run:
            return kubernetes.summarize(pods), kubernetes.describe(pods)
        return kubernetes.write(pods, request.write_to)
    script = render_script(request, now)
    _tell_needs(request, slurm.LOGIN)
    if request.dry_run:
        return slurm.summarize(script), slurm.describe(script)
    return slurm.write(script, request.write_to)


def _tell_needs(request: TrainCommand, how: str) -> None:
    """Tell what the user must add for trackers: logins are not written into files."""
    for name, needs in tracker_needs(request.given.get("report_to", "none")).items():
        say(f"note: --report-to {name} needs {' or '.join(needs)}: {how.format(key=needs[0])}")


def render_pods(request: TrainCommand, now: datetime) -> Rendered:
    """Return the job for Kubernetes. Raises :class:`UsageError` for options that don't fit together."""
    reference = request.recipe == "reference"
    stack = load_stack(request.stack or ("reference" if reference else DEFAULT_STACK))
    name = request.job_name or new_job_id(request.task, now)
    pods = kubernetes.read_pods(request, request.nodes, name, stack.name)
    placement = request.placement_options
    if reference:
        refuse_own_settings(request, ("demo",))
        preset = PRESETS[request.preset or "bert-large"]
        plan = plan_reference_in_pods(preset, request.run_qa, placement, pods, stack)
    else:
        plan = plan_in_pods(request.read_options(request.preset), placement, pods, stack)
    return render(plan, pods, stack)


def render_script(request: TrainCommand, now: datetime) -> SlurmScript:
    """Return the job for another Slurm cluster. Raises :class:`UsageError` as :func:`render_pods`."""
    name = request.job_name or new_job_id(request.task, now)
    options = slurm.read_script(request, request.nodes, name)
    resources = replace(request.resources, nodes=None)
    job = TrainRequest(spec_of(request.read_options(request.preset), resources=resources), Path())
    check_inputs(job.options)
    stack = load_stack(request.stack or DEFAULT_STACK)
    return slurm.render(plan_for_script(job, stack), options, stack)


def _plan_dry(request: TrainCommand, work: Work, target: Target, now: datetime) -> JobPlan:
    found = follow_stack(request, work, target.stack, now)
    if isinstance(found, ReferenceRequest):
        nodes = len(target.cluster.first(found.spec.resources.nodes).nodes)
        return plan_reference(found, target.stack, nodes)
    assert isinstance(found, TrainRequest)
    require_able_stack(target.stack, f"train {found.options.task}")
    return plan_training(found, target.stack)


def _build_work(request: TrainCommand, now: datetime) -> Work:
    """Return what to do, checked as far as possible locally. Raises :class:`UsageError`."""
    if request.resume is not None:
        return build_resume(request)
    work: TrainRequest | ReferenceRequest
    if request.recipe == "reference":
        work = build_reference(request, now)
    else:
        work = build_request(request, now)
        unusual = check_inputs(work.options)
        if unusual and not request.demo:
            say(f"Your data: {unusual}.")
    check_results(work.results)
    return work


def follow_stack(request: TrainCommand, work: Work, stack: Stack, now: datetime) -> Work:
    """Return the published recipe's request if `train squad`, without options, can't run otherwise."""
    if not isinstance(work, TrainRequest) or runs_tasks(stack) or not stack.examples:
        return work
    if request.task != "squad":
        return work
    try:
        found = build_reference(request, now)
    except UsageError:  # Its options are not the recipe's: refused with stacks that have them.
        return work
    say(f"stack {stack.name} runs only the published recipe: this is `--recipe reference`")
    return found


def _train(context: JobContext, request: Work) -> tuple[dict[str, Any], Path]:
    """Start or resume the job; return its results and their folder."""
    if isinstance(request, ResumeRequest):
        return resume(context, request)
    if isinstance(request, ReferenceRequest):
        return train_reference(context, request), request.results
    return train(context, request), request.results


def build_resume(request: TrainCommand) -> ResumeRequest:
    """Return the request to resume a job. Raises :class:`UsageError` if an option would change the job."""
    fixed = {"demo", "ccl_workers", "nodes", "cores", "memory", "elastic"}
    fixed |= {"placement", "recipe", "preset"}
    refused = request.given.keys() - _RESUME_MAY_CHANGE
    refused |= {name for name in fixed if request.has_set(name)}
    if refused:
        raise UsageError(
            f"{', '.join(sorted(map(flag, refused)))}: a resumed job keeps its own",
            hint="omit it, or start a new job without --resume",
        )
    change_options(TASKS[request.task].Options(), request.given)
    job, bucket = None if request.resume == LAST else request.resume, None
    if job and "://" in job:
        bucket, job = parse_stored_job(job, "--resume")
        if not job.startswith(f"{request.task}-"):
            raise UsageError(f"job {job} is not one of `train {request.task}`")
    results = expand_home(request.results) if request.results else None
    if results:
        check_writable(results)
    spec = request.spec(
        JobWork(request.task), replace(request.resources, nodes=None), retries=RETRIES
    )
    if bucket and spec.storage.bucket is None:
        spec = replace(spec, storage=Storage(bucket=str(bucket)))
    words = request.read_variables()
    own = request.task, job, results, request.given, spec, words, bucket
    return ResumeRequest(*own, request.retries)


def build_request(request: TrainCommand, now: datetime) -> TrainRequest:
    """Return the request of a new job. Raises :class:`UsageError` for an option out of range."""
    options = replace(request.read_options(request.preset), push_to=request.on_hub)
    least = request.elastic or 0
    if least and request.cores:
        raise UsageError("--elastic: not with --cores", hint="omit one of the two")
    if least and request.retries == 0:
        raise UsageError("--elastic: not with --retries 0, which ends the job at the first loss")
    work = spec_of(options).work
    if request.tune and not is_placement(tune := _read_tune(request)):
        if options.backend == "ccl":
            raise UsageError("--backend ccl: the trials of a study are separate: omit it")
        work = replace(work, study=asdict(plan_study(tune, request.trials, options)))
    return TrainRequest(
        request.spec(work, request.resources, retries=RETRIES, least_nodes=least),
        request.results_folder(request.task, now),
        request.may_tune,
        tracker_variables(options.report_to, request.read_variables()),
        hub_token=HUB_TOKEN in request.env,
    )


def build_reference(request: TrainCommand, now: datetime) -> ReferenceRequest:
    """Return the published recipe's request. Raises :class:`UsageError` for options that it fixes."""
    names = ("ppn", "ccl_workers", "cores", "demo", "elastic", "retries", "env")
    refuse_own_settings(request, names)
    if request.smoke and request.nodes not in (None, 1):
        raise UsageError("--smoke runs on one node: omit --nodes")
    if request.smoke and request.push_to:
        raise UsageError("--smoke trains no model: omit --push-to")
    script = check_script(expand_home(request.run_qa)) if request.run_qa else None
    return ReferenceRequest(
        preset=PRESETS[request.preset or "distilbert"],
        results=request.results_folder("squad", now),
        spec=request.spec(JobWork(), Resources(request.nodes)),
        script=script,
        smoke=request.smoke,
    )


def refuse_own_settings(request: TrainCommand, more: Iterable[str]) -> None:
    """Raise :class:`UsageError` for a training option, or one of ``more``, beside ``--recipe reference``."""
    refused = sorted(request.given) + [name for name in more if getattr(request, name)]
    if refused:
        raise UsageError(
            f"{', '.join(map(flag, refused))}: --recipe reference is the published command, with its "
            "own settings",
            hint="use --preset and --nodes to choose among those, or --recipe fast with these options",
        )
