"""Uploads to S3, against moto."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError
from moto import mock_aws

from infra.aws.s3 import check_s3_location, connect_s3, push_folder
from infra.errors import JobError, SprError, UsageError
from infra.s3_url import S3Location, parse_s3_url
from infra.wait import Silent
from jobs.cli.results.fetch import files_to_push, push


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    with mock_aws():
        client = connect_s3()
        client.create_bucket(Bucket="models")
        yield client


def keys(s3: Any) -> list[str]:
    return [each["Key"] for each in s3.list_objects_v2(Bucket="models").get("Contents", [])]


def refuse(operation: str, error: Exception, monkeypatch: pytest.MonkeyPatch, s3: Any) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(s3, operation, fail)


def test_to_look_whether_one_may_write_leaves_nothing(
    s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_s3_location(s3, S3Location("models", "squad"))
    assert keys(s3) == []
    assert s3.list_multipart_uploads(Bucket="models").get("Uploads", []) == []
    # That the probe can't be ended does not matter.
    denied = ClientError({"Error": {"Code": "AccessDenied"}}, "AbortMultipartUpload")
    refuse("abort_multipart_upload", denied, monkeypatch, s3)
    check_s3_location(s3, S3Location("models", ""))


_DENIED = ClientError({"Error": {"Code": "AccessDenied"}}, "CreateMultipartUpload")


@pytest.mark.parametrize(
    ("place", "error", "says", "hint"),
    [
        ("elsewhere/x", None, "bucket 'elsewhere' does not exist", "aws s3 mb s3://elsewhere"),
        ("models/x", _DENIED, "models/x: no permission to write", "--push-to s3://models/x"),
        ("models", EndpointConnectionError(endpoint_url="s3"), "cannot reach AWS", "the network"),
    ],
)
def test_why_nothing_can_be_stored_is_explained(
    s3: Any, monkeypatch: pytest.MonkeyPatch, place: str, error: Any, says: str, hint: str
) -> None:
    if error:
        refuse("create_multipart_upload", error, monkeypatch, s3)
    with pytest.raises(SprError, match=says) as caught:
        check_s3_location(s3, parse_s3_url(f"s3://{place}"))
    assert hint in str(caught.value.hint)


def test_without_credentials_it_says_so() -> None:
    with pytest.raises(UsageError, match="no AWS credentials found"):
        check_s3_location(connect_s3(), S3Location("models", ""))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    for name in ("model", "job"):
        (tmp_path / name).mkdir()
    for name in ("results.json", "job/log", "predictions.json", "report.html", ".keep"):
        (tmp_path / name).write_text(name)
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "model" / name).write_text("{}")
    # More than one part.
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\0" * (9 << 20))
    return tmp_path


def test_a_model_is_stored_in_its_jobs_folder_and_the_results_last(s3: Any, results: Path) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    def note(model: Any, params: dict[str, Any], **_: Any) -> None:
        asked.append((model.name, params["headers"]))

    s3.meta.events.register("before-call.s3", note)
    place = push((s3, S3Location("models", "squad")), results, "squad-1", Silent(), "")
    s3.meta.events.unregister("before-call.s3", note)

    assert place == "s3://models/squad/squad-1"
    below = "squad/squad-1"
    assert set(keys(s3)) == {
        *(f"{below}/model/{n}" for n in ("config.json", "model.safetensors", "tokenizer.json")),
        *(f"{below}/{n}" for n in ("job/log", "predictions.json", "results.json")),
    }
    assert list(files_to_push(results))[-1] == "results.json"
    result = s3.head_object(Bucket="models", Key=f"{below}/model/model.safetensors")
    assert result["ContentLength"] == 9 << 20
    assert result["Metadata"] == {"spr-cluster-job": "squad-1"}
    # Permission is asked for nothing but the objects.
    parts = {"CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"}
    assert {name for name, _ in asked} == {"PutObject", *parts}
    kinds = ("x-amz-acl", "x-amz-grant", "x-amz-server-side", "x-amz-tagging")
    assert not [h for _, headers in asked for h in headers if str(h).lower().startswith(kinds)]


@pytest.mark.parametrize("code", ["AccessDenied", "NoSuchBucket"])
def test_an_upload_that_fails_is_explained_and_not_by_boto3(
    s3: Any, results: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    def fail(**_: Any) -> None:
        raise ClientError({"Error": {"Code": code, "Message": "told by S3"}}, "PutObject")

    s3.meta.events.register("before-call.s3.PutObject", fail)
    with pytest.raises(UsageError, match=r"^--push-to s3://models/x"):
        push_folder(s3, {"log": results / "job/log"}, S3Location("models", "x"), about={})


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="has no model to push"):
        files_to_push(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").touch()  # all that `train digits` saves
    assert [*files_to_push(tmp_path)] == ["model/model.safetensors"]
