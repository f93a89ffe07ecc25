"""``spr-cluster predict``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from cluster.cli.common import add_cluster_options, open_chosen_cloud, open_context
from cluster.cli.display import make_progress
from cluster.cli.parser import SubParsers, add_command
from infra.errors import UsageError
from infra.files import check_folder
from jobs.train.predict import (
    Prediction,
    answer_here,
    answer_on_head,
    can_answer_here,
    find_model,
    no_place_to_answer,
    read_context,
)

_EXAMPLES = """\
  spr-cluster predict "Who wrote it?" --context article.txt
  spr-cluster predict "Where?" --context "The mill stands in Delft." --json
  spr-cluster predict "Where?" "When?" --context article.txt --model ./my-model
"""


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "predict",
        "Answer questions about a text with a trained model: on this machine if PyTorch and\n"
        "transformers are installed with this tool (the extra `job`), else on the cluster's head.",
        _EXAMPLES,
    )
    parser.add_argument("questions", nargs="+", metavar="TEXT", help="a question")
    parser.add_argument(
        "--context",
        required=True,
        metavar="FILE|TEXT",
        help="text that contains the answers, or its file",
    )
    parser.add_argument(
        "--model",
        metavar="DIR|JOB",
        help="model or results folder, or job ID (default: the newest in ./results, else on the "
        "head)",
    )
    add_cluster_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if not all(question.strip() for question in args.questions):
        raise UsageError("a question is empty")
    context = read_context(args.context)
    model = find_model(args.model)
    if model:
        check_folder(model)
    if model is not None and can_answer_here():
        where, answers = "here", answer_here(model, args.questions, context)
    else:
        where, answers = "head", _ask_head(args, context, model)
    if args.json:
        rows = [asdict(each) for each in answers]
        print(json.dumps({"where": where, "model": str(model or ""), "answers": rows}))
    else:
        print(render(answers))
    return 0


def _ask_head(args: argparse.Namespace, context: str, model: Path | None) -> list[Prediction]:
    progress = make_progress()
    try:
        ctx = open_context(args, open_chosen_cloud(args), progress=progress)
        cluster = ctx.find_cluster()
    except UsageError as error:
        raise error if can_answer_here() else no_place_to_answer(error) from None
    head = ctx.host_opener()(cluster.head)
    with progress.phase("Answer on the head"):
        return answer_on_head(head, args.questions, context, model, args.model)


def render(answers: Sequence[Prediction]) -> str:
    """Return the bare answer to one question, or each of several below its question."""
    texts = [each.text or "(no answer)" for each in answers]
    if len(texts) == 1:
        return texts[0]
    return "\n".join(
        f"{each.question}\n  {text}" for each, text in zip(answers, texts, strict=True)
    )
