"""``spr-cluster predict``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from cluster.cli.chosen_cluster import add_cluster_options, open_cluster
from cluster.console.display import make_progress
from cluster.console.output import emit
from cluster.console.parser import SubParsers, add_command, positive_int
from infra.errors import UsageError
from infra.files import check_folder
from infra.words import counted
from jobs.cli.shared.chosen_job import add_results_option, open_job_context
from jobs.cli.shared.job_options import add_queue_options, detachable, results_folder
from jobs.train.predict import (
    Prediction,
    PredictRequest,
    can_answer_here,
    check_prediction,
    find_model,
    make_rows,
    no_place_to_answer,
    predict_file_here,
    predict_here,
    predict_on_head,
    predict_on_nodes,
    read_context,
)
from jobs.train.request import check_results, expand_home
from jobs.worker.spec import PlacementOptions
from jobs.worker.tasks.predict_file import INPUTS, PredictOptions
from jobs.worker.training.options import flag, is_url

_EXAMPLES = """\
  spr-cluster predict "Who wrote it?" --context article.txt
  spr-cluster predict "Where?" --context "The mill stands in Delft." --json
  spr-cluster predict "an excellent read" --model classify-20261124-142501-k3f
  spr-cluster predict "Where?" "When?" --context article.txt --model ./mine
  spr-cluster predict --data reviews.csv --output predictions.parquet
  spr-cluster predict --data reviews.parquet --output out.jsonl --nodes all
  spr-cluster predict --data s3://my-data/a.csv.gz --output b.csv --nodes 4
"""
_ALL = "all"
_RETRIES = 1


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "predict",
        "Use a trained model: answer questions about a text, classify texts, tag their words, compute their\n"
        "vectors (embed) or their perplexity (lm). This happens on this machine if PyTorch and transformers\n"
        "are installed with this tool (the extra `job`), else on the cluster's head. With --data and\n"
        "--output, predict for each row of a file, here or as a job on the nodes of the cluster.",
        _EXAMPLES,
        run=detachable(run),
    )
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="a question, or a text")
    parser.add_argument(
        "--context",
        metavar="FILE|TEXT",
        help="for questions: the text that contains the answers, or its file",
    )
    parser.add_argument(
        "--model",
        metavar="DIR|JOB",
        help="model or results folder, or job ID (default: the newest in ./results, else on the "
        "head)",
    )
    files = parser.add_argument_group("files")
    files.add_argument(
        "--data",
        metavar="PATH",
        help="rows to predict for: a CSV, TSV, JSON, JSON lines, Parquet, or CoNLL file, also gzipped, or "
        "s3://…",
    )
    files.add_argument(
        "--output",
        metavar="FILE",
        help="file for the rows with their predictions: .csv, .jsonl, or .parquet",
    )
    for name in INPUTS:
        what = {"text": "the texts", "pair": "the second text of pairs"}.get(name, f"the {name}s")
        files.add_argument(flag(f"{name}_column"), metavar="NAME", help=f"column with {what}")
    files.add_argument(
        "--skip-bad-records",
        action="store_true",
        help="leave out rows that can't be used instead of refusing the file",
    )
    files.add_argument(
        "--nodes",
        type=_nodes,
        metavar=f"N|{_ALL}",
        help="share the rows among this number of nodes (default: predict here, or, where that can't be, on "
        "one node)",
    )
    files.add_argument(
        "--ppn", type=positive_int, metavar="N", help="ranks per node (default: one per NUMA node)"
    )
    add_queue_options(parser.add_argument_group("queue"), retries=_RETRIES)
    add_results_option(parser, "the job's log and record")
    add_cluster_options(parser)


def _nodes(text: str) -> int | str:
    return text if text == _ALL else positive_int(text)


def run(args: argparse.Namespace) -> int:
    if (args.data is None) != (args.output is None):
        raise UsageError("--data and --output belong together")
    if bool(args.texts) == (args.data is not None):
        raise UsageError("give texts, or a file with --data", hint="spr-cluster predict --help")
    if args.data is not None:
        return _run_file(args)
    _refuse(args, "requires --data", *_OF_FILES, *_OF_JOBS)
    if not all(text.strip() for text in args.texts):
        raise UsageError("a text is empty")
    rows = make_rows(args.texts, None if args.context is None else read_context(args.context))
    model = find_model(args.model)
    if model:
        check_folder(model)
    if model is not None and can_answer_here():
        where, answers = "here", predict_here(model, rows)
    else:
        where, answers = "head", _ask_head(args, rows, model)
    data = {"where": where, "model": str(model or ""), "answers": answers}
    emit(args, lambda: render(answers), data)
    return 0


_OF_FILES = (*(f"{name}_column" for name in INPUTS), "skip_bad_records", "nodes")
_OF_JOBS = ("ppn", "results", "detach", "bucket", "until_done", "on_finish", "down_when_done")


def _refuse(args: argparse.Namespace, why: str, *names: str) -> None:
    if given := [flag(name) for name in names if getattr(args, name)]:
        raise UsageError(f"{given[0]} {why}")


def _run_file(args: argparse.Namespace) -> int:
    """Predict for a file: here if that is possible and no number of nodes is given."""
    _refuse(args, "is for texts, not for --data", "context")
    columns = {name: getattr(args, f"{name}_column") for name in INPUTS}
    options = PredictOptions(
        model="",
        data=args.data if is_url(args.data) else str(expand_home(args.data)),
        output=str(expand_home(args.output)),
        columns={name: column for name, column in columns.items() if column is not None},
        skip_bad_records=args.skip_bad_records,
    )
    model = find_model(args.model)
    check_prediction(options, model)
    if model:
        check_folder(model)
    is_here = args.nodes is None and model and can_answer_here() and not is_url(options.data)
    if is_here:
        _refuse(args, "requires --nodes: the model runs here", *_OF_JOBS)
        progress = make_progress()
        with progress.phase(f"Predict with {model}"):
            found = predict_file_here(replace(options, model=str(model)), progress)
    else:
        found = _predict_by_job(args, options, model)
    where = "here" if is_here else "cluster"
    shown = ("task", "rows", "skipped", "skip_note", "rows_per_second")
    data = {"where": where, "model": str(model or ""), "output": options.output}
    text = f"{options.output}: {counted(found['rows'], 'row')}, {found['rows_per_second']:,} rows/s"
    text += f"\n{found['skip_note']}" if found["skip_note"] else ""
    emit(args, text, {**data, **{name: found[name] for name in shown}})
    return 0


def _predict_by_job(
    args: argparse.Namespace, options: PredictOptions, model: Path | None
) -> dict[str, Any]:
    now = datetime.now(timezone.utc)
    results = results_folder(args, "predict", now)
    check_results(results)
    try:
        context = open_job_context(args, now)
    except UsageError as error:
        raise error if args.nodes or can_answer_here() else no_place_to_answer(error) from None
    nodes = 1 if args.nodes is None else None if args.nodes == _ALL else args.nodes
    placement = PlacementOptions(nproc_per_node=args.ppn)
    request = PredictRequest(options, results, model, args.model, nodes, placement, args.retries)
    return predict_on_nodes(context, request)


def _ask_head(
    args: argparse.Namespace, rows: Sequence[Mapping[str, str]], model: Path | None
) -> list[Prediction]:
    progress = make_progress()
    try:
        ctx = open_cluster(args, progress)
        cluster = ctx.find_cluster()
    except UsageError as error:
        raise error if can_answer_here() else no_place_to_answer(error) from None
    head = ctx.host_opener()(cluster.head)
    with progress.phase("Answer on the head"):
        return predict_on_head(head, rows, model, args.model)


def render(answers: Sequence[Prediction]) -> str:
    """Render the answer to one row, or several answers below their questions or texts."""
    texts = [_render(each) for each in answers]
    if len(texts) == 1:
        return texts[0]
    return "\n".join(
        f"{each.get('question') or each['text']}\n  " + text.replace("\n", "\n  ")
        for each, text in zip(answers, texts, strict=True)
    )


def _render(found: Prediction) -> str:
    if "labels" in found:
        return ", ".join(found["labels"]) or "(no label)"
    if "tags" in found:
        rows = zip(found["words"], found["tags"], strict=True)
        return "\n".join(f"{word}\t{tag}" for word, tag in rows)
    if "perplexity" in found:
        return f"perplexity {found['perplexity']:g}"
    if "value" in found:
        return f"{found['value']:g}"
    return found.get("text") or "(no answer)"
