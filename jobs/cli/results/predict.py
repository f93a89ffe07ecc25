"""``spr-cluster predict``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from cluster.cli.chosen_cluster import open_cluster
from cluster.console.display import PlainProgress, TreeProgress, make_progress
from cluster.console.options import argument, option, positive_int, switch
from cluster.console.output import emit, say
from cluster.console.parser import Parser, add_request
from infra.errors import UsageError
from infra.words import counted
from jobs.cli.shared.chosen_job import open_job_context
from jobs.cli.shared.job_options import QueueRequest, ResultsRequest, VariableRequest
from jobs.cli.shared.when_done import OnCluster, follow_to_end
from jobs.train.generation import PARSERS
from jobs.train.predict import (
    OnHead,
    Prediction,
    PredictRequest,
    can_answer_here,
    check_model,
    check_prediction,
    find_model,
    has_adapters,
    make_rows,
    merge_here,
    no_place_to_answer,
    predict_file_here,
    predict_here,
    predict_on_nodes,
    read_context,
    read_rows,
)
from jobs.train.request import (
    MAX_DATA_BYTES,
    check_results,
    check_writable,
    expand_home,
    expand_path,
)
from jobs.worker.corpus.options import INPUTS, PredictOptions
from jobs.worker.corpus.writers import finite
from jobs.worker.data.records import show
from jobs.worker.spec import PlacementOptions, Resources, Work
from jobs.worker.training.options import flag, is_url

_ALL = "all"
_RETRIES = 100  # an attempt repeats only the shards that a lost node was computing
_FILES: dict[str, Any] = {"section": "files"}
_OF_ROWS: dict[str, Any] = {"section": "files", "needs": "--data"}
_OF_LM: dict[str, Any] = {"section": "language models"}
_COLUMN: dict[str, Any] = {"metavar": "NAME", **_OF_ROWS}


def _nodes(text: str) -> int | str:
    return text if text == _ALL else positive_int(text)


@dataclass(frozen=True, kw_only=True)
class PredictCommand(QueueRequest, ResultsRequest, VariableRequest):
    """Use a trained model: answer questions about a text, classify or score texts, tag their words,
    compute their vectors (embed), or continue them (lm). This happens on this machine if PyTorch and
    transformers are installed with this tool (the extra `job`), else on the cluster's head. With
    --data and --output, predict for each row of files, here or as a job on the nodes of the cluster.

    examples:
      spr-cluster predict "Who wrote it?" --context article.txt
      spr-cluster predict "Where?" --context "The mill stands in Delft." --json
      spr-cluster predict "an excellent read" --model classify-20261124-142501-k3f
      spr-cluster predict "Where?" "When?" --context article.txt --model ./mine
      spr-cluster predict "Once upon a" --max-new-tokens 40 --temperature 0.8
      spr-cluster predict - < texts.txt --json
      spr-cluster predict --model results/lm-20261124-142501-k3f --merge ./whole
      spr-cluster predict --data reviews.csv --output predictions.parquet
      spr-cluster predict --data reviews.parquet --output out.jsonl --nodes all
      spr-cluster predict --data s3://my-data/a.csv.gz --output b.csv --nodes 4
      spr-cluster predict --data s3://a/texts/ --output s3://a/out/ --budget 20
    """

    texts: tuple[str, ...] = argument(
        "a question, or a text; - reads standard input, where each line is one, or a JSON object such as "
        '{"text": "…", "pair": "…"}',
        (),
        takes="*",
        metavar="TEXT",
    )
    context: str | None = option(
        "for questions: the text that contains the answers, or its file", metavar="FILE|TEXT"
    )
    model: str | None = option(
        "model or results folder, or job ID (default: the newest in ./results, else on the head)",
        metavar="DIR|JOB",
    )
    max_new_tokens: int | None = option(
        "most tokens to add to a text (default: 256)",
        parse=PARSERS["max_new_tokens"],
        metavar="N",
        **_OF_LM,
    )
    temperature: float | None = option(
        "draw tokens at random, the more the higher it is (default: 0, the likeliest one)",
        parse=PARSERS["temperature"],
        metavar="T",
        **_OF_LM,
    )
    top_p: float | None = option(
        "draw only from the likeliest tokens that together have this probability (default: 1)",
        parse=PARSERS["top_p"],
        metavar="P",
        needs="--temperature",
        **_OF_LM,
    )
    seed: int | None = option(
        "of the random numbers (default: 42)",
        parse=PARSERS["seed"],
        needs="--temperature",
        **_OF_LM,
    )
    perplexity: bool = switch("compute each text's perplexity instead of adding to it", **_OF_LM)
    merge: str | None = option(
        "write adapters, merged into their model, as a whole model to this new folder",
        metavar="DIR",
        **_OF_LM,
    )
    data: str | None = option(
        "rows to predict for: a CSV, TSV, JSON, JSON lines, Parquet, or CoNLL file, also gzipped, a "
        "folder with such files, or either as s3://…",
        metavar="PATH",
        **_FILES,
    )
    output: str | None = option(
        "the rows with their predictions: a .csv, .jsonl, or .parquet file, or a folder for Parquet "
        "files and _manifest.json, also as s3://…; in a folder, what is there is not computed again",
        metavar="PATH",
        **_FILES,
    )
    text_column: str | None = option("column with the texts", **_COLUMN)
    pair_column: str | None = option("column with the second text of pairs", **_COLUMN)
    question_column: str | None = option("column with the questions", **_COLUMN)
    context_column: str | None = option("column with the contexts", **_COLUMN)
    skip_bad_records: bool = switch(
        "leave out rows that can't be used instead of refusing the file", **_OF_ROWS
    )
    nodes: int | str | None = option(
        "share the rows among this number of nodes (default: predict here, or, where that can't be, on "
        "one node)",
        parse=_nodes,
        metavar=f"N|{_ALL}",
        **_OF_ROWS,
    )
    ppn: int | None = option(
        "ranks per node (default: one per NUMA node)", parse=positive_int, metavar="N", **_OF_ROWS
    )

    @property
    def columns(self) -> dict[str, str]:
        """The columns that the user named, by what they contain."""
        named = {name: getattr(self, f"{name}_column") for name in INPUTS}
        return {name: column for name, column in named.items() if column is not None}

    @property
    def settings(self) -> dict[str, Any]:
        """The options of language models that the user gave."""
        names = (*PARSERS, "perplexity")
        return {name: getattr(self, name) for name in names if self.has_set(name)}

    def refuse(self, why: str, *names: str) -> None:
        """Raise :class:`UsageError` if one of these options is given."""
        for name in names:
            if self.has_set(name):
                raise UsageError(f"{flag(name)} {why}")


_OF_JOBS = (
    *("ppn", "results", "retries", "detach", "bucket", "on_finish"),
    *("down_when_done", "env", "max_time", "budget"),
)


def add_parser(parent: Parser) -> None:
    add_request(parent, "predict", run, PredictCommand)


def run(request: PredictCommand) -> int:
    if request.merge is not None:
        return _merge(request, expand_home(request.merge))
    if request.perplexity:
        request.refuse("has no effect on --perplexity", *PARSERS)
    if (request.data is None) != (request.output is None):
        raise UsageError("--data and --output belong together")
    if request.texts and request.data is not None:
        raise UsageError(
            f"both a text ({show(request.texts[0])}) and --data are given",
            hint="a model, its results folder, or its job goes to --model",
        )
    if not request.texts and request.data is None:
        raise UsageError("give texts, or a file with --data", hint="spr-cluster predict --help")
    if request.data is not None and request.output is not None:
        options = PredictOptions(
            model="",
            data=expand_path(request.data),
            output=expand_path(request.output),
            columns=request.columns,
            skip_bad_records=request.skip_bad_records,
            settings=request.settings,
        )
        return follow_to_end(
            request,
            lambda on_cluster: _run_file(request, options, on_cluster),
            detach=request.detach,
        )
    return _run_texts(request)


def _run_texts(request: PredictCommand) -> int:
    request.refuse("requires --data", *_OF_JOBS)
    context = None if request.context is None else read_context(request.context)
    if request.texts == ("-",):
        rows = read_rows(sys.stdin.buffer.read(), context)
    elif "-" in request.texts:
        raise UsageError("- (standard input) can't be used with other texts")
    else:
        for text in request.texts if request.model is None else ():
            if os.path.isdir(text):  # noqa: PTH112 - a text may be too long for a path
                raise UsageError(
                    f"{show(text)} is a folder, not a text", hint="--model names a model"
                )
        rows = make_rows(request.texts, context)
    model = find_model(request.model, say)
    check_model(model, request.settings, has_context=context is not None)
    if model is not None and can_answer_here():
        where, answers = "here", predict_here(model, rows, request.settings)
    else:
        where = "head"
        head, progress = _open_head(request, model)
        with progress.phase("Answer on the head"):
            answers = head.predict(rows, request.settings)
    data = {"where": where, "model": str(model or ""), "answers": finite(answers)}
    emit(request, lambda: render(answers), data)
    return 0


def _merge(request: PredictCommand, target: Path) -> int:
    """Write adapters, merged into their model, into a new folder."""
    if request.texts:
        raise UsageError("texts can't be used with --merge")
    others = ("data", "output", "context", "perplexity", *PARSERS)
    request.refuse("can't be used with --merge", *others, *_OF_JOBS)
    if target.exists():
        raise UsageError(f"--merge {target}: exists already", hint="name a new folder")
    check_writable(target, "--merge")
    model = find_model(request.model, say)
    check_model(model)
    if model and not has_adapters(model):
        raise UsageError(f"--merge: {model} is a whole model, without adapters")
    if model and can_answer_here():
        with make_progress().phase(f"Merge {model}"):
            merge_here(model, target)
    else:
        head, progress = _open_head(request, model)
        with progress.phase("Merge on the head"):
            head.merge(target, progress.note)
    emit(request, f"{target}/", {"model": str(model or ""), "merged": str(target)})
    return 0


def _run_file(request: PredictCommand, options: PredictOptions, on_cluster: OnCluster) -> int:
    """Predict for a file: here if that is possible and no number of nodes is given."""
    request.refuse("is for texts, not for --data", "context")
    model = find_model(request.model, say)
    check_model(model, options.settings)
    in_s3 = is_url(options.data) or is_url(options.output)
    is_here = request.nodes is None and model and can_answer_here() and not in_s3
    check_prediction(options, model, None if is_here else MAX_DATA_BYTES)
    if is_here:
        request.refuse("requires --nodes: the model runs here", *_OF_JOBS)
        progress = make_progress()
        with progress.phase(f"Predict with {model}"):
            found = predict_file_here(replace(options, model=str(model)), progress)
    else:
        found = _predict_by_job(request, options, model, on_cluster)
    where = "here" if is_here else "cluster"
    shown = ("task", "rows", "skipped", "skip_note", "rows_per_second", "usd_per_million_rows")
    data = {"where": where, "model": str(model or ""), "output": options.output}
    speed = f"{found['rows_per_second']:,} rows/s" if found["rows_now"] else "all done before"
    text = f"{options.output}: {counted(found['rows'], 'row')}, {speed}"
    usd = found["usd_per_million_rows"]
    text += f", ${usd:.2f} per million rows" if usd else ""
    text += f"\n{found['skip_note']}" if found["skip_note"] else ""
    emit(request, text, {**data, **{name: found[name] for name in shown}})
    return 0


def _predict_by_job(
    request: PredictCommand, options: PredictOptions, model: Path | None, on_cluster: OnCluster
) -> dict[str, Any]:
    now = datetime.now(timezone.utc)
    results = request.results_folder("predict", now)
    check_results(results)
    try:
        context = open_job_context(request, now, on_cluster=on_cluster)
    except UsageError as error:
        raise error if request.nodes or can_answer_here() else no_place_to_answer(error) from None
    nodes = None if request.nodes == _ALL else int(request.nodes or 1)
    resources = Resources(nodes, PlacementOptions(nproc_per_node=request.ppn))
    work = Work("predict", asdict(options))
    spec = request.spec(work, resources, retries=_RETRIES, least_nodes=1)
    words = request.read_variables()
    wanted = PredictRequest(options, results, model, request.model, spec, words)
    return predict_on_nodes(context, wanted)


def _open_head(
    request: PredictCommand, model: Path | None
) -> tuple[OnHead, PlainProgress | TreeProgress]:
    progress = make_progress()
    try:
        ctx = open_cluster(request, progress)
        cluster = ctx.find_cluster()
    except UsageError as error:
        raise error if can_answer_here() else no_place_to_answer(error) from None
    return OnHead(ctx.host_opener()(cluster.head), model, request.model, say), progress


def render(answers: Sequence[Prediction]) -> str:
    """Render the answer to one row, or several answers below their questions or texts."""
    texts = [_render(each) for each in answers]
    if len(texts) == 1:
        return texts[0]
    return "\n".join(
        f"{_title(each, number)}\n  " + text.replace("\n", "\n  ")
        for number, (each, text) in enumerate(zip(answers, texts, strict=True), start=1)
    )


def _title(found: Prediction, number: int) -> str:
    asked = (found.get(name) for name in ("question", "prompt", "text"))
    return next((each for each in asked if isinstance(each, str)), f"row {number}")


def _render(found: Prediction) -> str:
    if "labels" in found:
        return ", ".join(found["labels"]) or "(no label)"
    if "tags" in found:
        rows = zip(found["words"], found["tags"], strict=True)
        return "\n".join(f"{word}\t{tag}" for word, tag in rows)
    if "completion" in found:
        return str(found["completion"])
    if "perplexity" in found:
        return f"perplexity {found['perplexity']:g}"
    if "embedding" in found:
        return json.dumps(found["embedding"])
    if "start" not in found and "score" in found:
        return f"{found['score']:g}"
    return found.get("text") or "(no answer)"
