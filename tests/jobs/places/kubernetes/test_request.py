"""Requests: the same training as on bare metal, with paths that the pods have."""

from __future__ import annotations

from jobs.places.kubernetes.image import sample_in_image
from jobs.worker.tasks.squad.task import SAMPLE, SquadOptions
from tests.jobs.places.kubernetes.rendering import rendered


def options(*words: str) -> SquadOptions:
    """What a rank makes of its arguments."""
    args = rendered(*words).job["spec"]["trainer"]["args"]
    assert args[:3] == ["-m", "worker.tasks", "squad"]
    return SquadOptions.from_json(args[3])


def test_training_options_reach_the_ranks() -> None:
    data = "/workspace/data/train.json"
    found = options("--epochs", "3", "--data", data, "--model", "roberta-base")

    assert (found.epochs, found.model, found.data) == (3, "roberta-base", data)
    assert found.output == "/workspace/jobs/bert/output"
    assert found.token_cache == "/workspace/cache/tokens"
    assert found.resume, "a restarted pod has the same arguments"
    assert options("--preset", "bert-large").model == "bert-large-uncased"


def test_the_image_has_what_the_options_need() -> None:
    text = rendered("--demo", "--export", "int8", "--report-to", "tensorboard").dockerfile
    assert " 'openvino>=2026.3,<2027' 'nncf>=3.3,<4' 'tensorboard>=2.18,<3'\n" in text


def test_the_demo_needs_neither_claim_data_nor_hub() -> None:
    found = rendered("--demo")
    env = {each["name"]: each["value"] for each in found.job["spec"]["trainer"]["env"]}

    data = sample_in_image(SAMPLE)
    assert options("--demo").data == data
    assert "code" + data.partition("/code")[2] in found.build
    assert env["HF_HUB_OFFLINE"] == "1"


def test_the_reference_recipe_is_the_documentations_command() -> None:
    found = rendered("--recipe", "reference")
    args = found.job["spec"]["trainer"]["args"]
    command = args[args.index("python") :]

    wanted = "--model_name_or_path bert-large-uncased --dataset_name squad --do_train --do_eval"
    assert wanted in " ".join(command)
    assert command[command.index("--output_dir") + 1] == "/workspace/jobs/bert/output/model"
    assert "--overwrite_output_dir" not in command, "a restarted pod resumes"
    text = found.yaml_files()["job.yaml"]
    script = rendered("--recipe", "reference", "--run-qa", "/workspace/qa/run_qa.py").plan.argv
    assert "/workspace/qa/run_qa.py" in script
    # Of what is corrected, only the replicas' policies are PyTorchJob's own.
    pytorch = rendered("--recipe", "reference", "--kind", "PyTorchJob").yaml_files()["job.yaml"]
    assert (text.count("Corrected:"), pytorch.count("Corrected:")) == (11, 12)
