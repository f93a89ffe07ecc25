"""``spr-cluster predict``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster.cli.chosen_cluster import add_cluster_options, open_cluster
from cluster.console.display import make_progress
from cluster.console.output import emit
from cluster.console.parser import SubParsers, add_command
from infra.errors import UsageError
from infra.files import check_folder
from jobs.train.predict import (
    Prediction,
    can_answer_here,
    find_model,
    make_rows,
    no_place_to_answer,
    predict_here,
    predict_on_head,
    read_context,
)

_EXAMPLES = """\
  spr-cluster predict "Who wrote it?" --context article.txt
  spr-cluster predict "Where?" --context "The mill stands in Delft." --json
  spr-cluster predict "an excellent read" --model classify-20261124-142501-k3f
  spr-cluster predict "Where?" "When?" --context article.txt --model ./mine
"""


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "predict",
        "Answer questions about a text, classify texts, or tag their words with a trained model: on this\n"
        "machine if PyTorch and transformers are installed with this tool (the extra `job`), else on the\n"
        "cluster's head.",
        _EXAMPLES,
        run=run,
    )
    parser.add_argument("texts", nargs="+", metavar="TEXT", help="a question, or a text")
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
    add_cluster_options(parser)


def run(args: argparse.Namespace) -> int:
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
