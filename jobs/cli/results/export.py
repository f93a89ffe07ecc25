"""``spr-cluster export``."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from cluster.cli.chosen_cluster import ClusterRequest
from cluster.console.display import make_progress
from cluster.console.options import JsonRequest, argument, option
from cluster.console.output import emit
from cluster.console.parser import Parser, add_request
from infra.errors import MissingExtraError, NoClusterError
from jobs.cli.results.serve import require_model
from jobs.cli.shared.chosen_job import open_job_context
from jobs.cli.shared.job_display import JobDisplay, render_result
from jobs.cli.shared.job_options import ResultsRequest
from jobs.places.queue.job_output import JobOutput
from jobs.train.export import can_export_here, export_here, export_options
from jobs.train.predict import silence_libraries
from jobs.train.request import TrainRequest, check_inputs, check_results, expand_path, spec_of
from jobs.train.train import train
from jobs.worker.spec import Resources


@dataclass(frozen=True, kw_only=True)
class ExportRequest(JsonRequest, ResultsRequest):
    """Export a trained encoder for OpenVINO, in int8 if its score allows that, and compare its score,
    rows per second, and latency of single rows with the original. The results are a new folder with
    the model in both forms; the original stays as it is.

    examples:
      spr-cluster export                              the newest in ./results
      spr-cluster export classify-20261124-142501-k3f --max-loss 0.2
      spr-cluster export ./model --data train.csv --eval dev.csv
      spr-cluster export ./model --data train.csv --eval dev.csv --name bert
    """

    model: str | None = argument(
        "model or results folder, or job below ./results (default: the newest there)",
        None,
        metavar="DIR|JOB",
    )
    data: str | None = option(
        "training data, for calibration (default: those of the model's job)", metavar="PATH"
    )
    eval: str | None = option(
        "data that measure the loss (default: those of the model's job)", metavar="PATH"
    )
    precision: str = option(
        "int8: unless that costs more than --max-loss; bf16: no int8 at all (default: int8)",
        "int8",
        choices=("int8", "bf16"),
    )
    max_loss: float = option(
        "points of the score that the exported model may lose (default: 0.5)", 0.5, parse=float
    )
    name: str | None = option(
        "export on the first node of this cluster (default: here, if the extra `export` is installed)"
    )


def add_parser(parent: Parser) -> None:
    add_request(parent, "export", run, ExportRequest)


def run(request: ExportRequest) -> int:
    now, model = datetime.now(timezone.utc), require_model(request.model)
    given: dict[str, Any] = {"export": request.precision, "max_loss": request.max_loss}
    paths = {"data": request.data, "eval": request.eval}
    given |= {name: expand_path(path) for name, path in paths.items() if path}
    options = export_options(model, given)
    check_inputs(options)
    results = request.results_folder(options.task, now)
    check_results(results)
    if request.name is None and can_export_here():
        silence_libraries(model)
        display = JobDisplay(make_progress())
        result = export_here(options, JobOutput(display.event, display.log), results)
    else:
        try:
            context = open_job_context(ClusterRequest(name=request.name), now)
        except NoClusterError as error:
            if request.name:
                raise
            why = f"OpenVINO or PyTorch is not installed here, and there is no cluster: {error.message}"
            raise MissingExtraError(why, "export") from None
        result = train(context, TrainRequest(spec_of(options, resources=Resources(1)), results))
    emit(request, render_result(result, results), result)
    return 0
