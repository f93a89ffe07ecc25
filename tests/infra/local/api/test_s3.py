"""The embedded cloud's S3 as its nodes and the user's machine see it."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from moto.s3.models import s3_backends
from werkzeug.serving import make_server

from infra.errors import CloudError
from infra.local.api.application import Application
from infra.local.api.bucket_server import BucketServer
from infra.local.api.object_files import ObjectFile
from infra.local.state import StateFolder, load_snapshot
from jobs.worker.storage.client import connect
from tests.aws import answered_directly
from tests.infra.local.fakes import (
    CREDENTIALS,
    Endpoint,
    FakeCloud,
    FakePodman,
    connect_node,
    refusal,
)


@contextmanager
def node_in(region: str, cloud: FakeCloud) -> Iterator[str]:
    """Serve S3 as on the socket of a node in this region; yields the URL."""
    application: Any = partial(cloud.application.buckets, region=region)
    server = make_server("127.0.0.1", 0, application, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("name", ["", "AWS_DEFAULT_REGION"])
def test_a_node_signs_for_its_own_region(
    fake_cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    fake_cloud.clients.s3.create_bucket(Bucket="team")
    monkeypatch.delenv("AWS_REGION")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", CREDENTIALS[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CREDENTIALS[1])
    if name:
        monkeypatch.setenv(name, "eu-central-1")
    with node_in("eu-central-1", fake_cloud) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
        s3 = connect()
        if name:
            assert s3.list_objects_v2(Bucket="team")["KeyCount"] == 0
        else:
            assert refusal(s3.list_objects_v2, Bucket="team") == "InvalidAccessKeyId"


def test_only_requests_signed_with_this_clouds_secret_are_answered(fake_cloud: FakeCloud) -> None:
    for credentials in ((CREDENTIALS[0], "wrong"), ("stranger", CREDENTIALS[1])):
        stranger = fake_cloud.endpoint.client("s3", credentials)
        assert refusal(stranger.create_bucket, Bucket="team") == "InvalidAccessKeyId"
    assert fake_cloud.clients.s3.list_buckets()["Buckets"] == []


def test_the_next_server_has_the_buckets_and_files_of_their_objects_alone(
    fake_cloud: FakeCloud,
) -> None:
    s3, buckets, folder = fake_cloud.clients.s3, fake_cloud.application.buckets, fake_cloud.folder
    s3.create_bucket(Bucket="team")
    for body in (b"old", b"model"):
        s3.put_object(Bucket="team", Key="a/b c", Body=body, Metadata={"job": "squad-1"})
    upload = s3.create_multipart_upload(Bucket="team", Key="parts")["UploadId"]
    given: Any = {"Bucket": "team", "Key": "parts", "UploadId": upload}
    part = s3.upload_part(**given, PartNumber=1, Body=b"part")
    buckets.save()
    assert {path.read_bytes() for path in folder.objects.iterdir()} == {b"model", b"part"}
    s3_backends.clear()
    s3_backends.bucket_accounts.clear()
    assert refusal(s3.head_bucket, Bucket="team") == "404"

    buckets.load()

    found = s3.get_object(Bucket="team", Key="a/b c")
    assert (found["Body"].read(), found["Metadata"]) == (b"model", {"job": "squad-1"})
    listed: Any = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    s3.complete_multipart_upload(**given, MultipartUpload=listed)
    assert s3.get_object(Bucket="team", Key="parts")["Body"].read() == b"part"
    for key in ("a/b c", "parts"):
        s3.delete_object(Bucket="team", Key=key)
    s3.delete_bucket(Bucket="team")
    buckets.save()
    assert load_snapshot(folder.buckets) == {}
    assert [*folder.objects.iterdir()] == []


def test_buckets_survive_a_move_of_their_folder(fake_cloud: FakeCloud) -> None:
    s3, root = fake_cloud.clients.s3, fake_cloud.folder.root
    s3.create_bucket(Bucket="team")
    s3.put_object(Bucket="team", Key="a", Body=b"model")
    fake_cloud.application.buckets.save()
    BucketServer(StateFolder(root.rename(root.with_name("moved")))).load()
    assert s3.get_object(Bucket="team", Key="a")["Body"].read() == b"model"


def test_threads_read_an_object_independently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ObjectFile, "folder", tmp_path, raising=False)
    file = ObjectFile(0)
    file.write(b"model")
    file.seek(0)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(file.seek, 3).result()
        assert pool.submit(file.read).result() == b"el"
    assert (file.read(2), file.read()) == (b"mo", b"del")


def test_an_object_that_does_not_fit_on_the_disk_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(path: Path, _: bytes) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ObjectFile, "folder", tmp_path, raising=False)
    monkeypatch.setattr(Path, "write_bytes", fill)
    with pytest.raises(OSError, match="No space left"):
        ObjectFile(0).write(b"model")
    assert [*tmp_path.iterdir()] == []


def test_damaged_buckets_are_refused_and_kept(
    endpoint: Endpoint, folder: StateFolder, podman: FakePodman
) -> None:
    folder.create()
    folder.buckets.write_bytes(b"damaged")
    with (
        pytest.raises(CloudError, match=r"s3\.pickle can't be read") as caught,
        endpoint.serve(folder, podman),
    ):
        pass
    assert "local reset" in str(caught.value.hint)
    assert folder.buckets.read_bytes() == b"damaged"


def test_a_save_that_failed_is_not_repeated_at_once(
    fake_cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    buckets, full = fake_cloud.application.buckets, Mock(side_effect=OSError(errno.ENOSPC, "full"))
    fake_cloud.clients.s3.create_bucket(Bucket="team")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="full"):
        buckets.save_changes()
    buckets.save_changes()
    assert full.call_count == 1


def test_buckets_are_saved_while_they_change(fake_cloud: FakeCloud) -> None:
    s3, buckets = fake_cloud.clients.s3, fake_cloud.application.buckets
    s3.create_bucket(Bucket="team")

    def upload(number: int) -> None:
        for index in range(50):
            s3.put_object(Bucket="team", Key=f"{number}/{index}", Body=b"x" * 1000)

    with ThreadPoolExecutor(4) as pool:
        uploads = [pool.submit(upload, number) for number in range(4)]
        while not all(each.done() for each in uploads):
            buckets.save()
    buckets.save()
    assert len(load_snapshot(fake_cloud.folder.buckets)["team"].keys) == 200


Call = tuple[str, dict[str, Any]]


@pytest.mark.parametrize(
    ("call", "is_allowed"),
    [
        (("put_object", {"Key": "mine/k"}), True),
        (("delete_object", {"Key": "other/k"}), False),
        (("delete_objects", {"Delete": {"Objects": [{"Key": "mine/k"}]}}), True),
        (
            ("delete_objects", {"Delete": {"Objects": [{"Key": "mine/k"}, {"Key": "other/k"}]}}),
            False,
        ),
        (("copy_object", {"Key": "mine/l", "CopySource": "team/mine/k"}), True),
        (("copy_object", {"Key": "mine/l", "CopySource": "team/other/k"}), False),
        (("list_multipart_uploads", {"Prefix": "mine/"}), True),
        (("put_object_tagging", {"Key": "mine/k", "Tagging": {"TagSet": []}}), False),
        (("put_bucket_policy", {"Policy": "{}"}), False),
        (("list_object_versions", {}), False),
    ],
)
def test_a_node_may_do_what_its_role_allows_and_no_more(
    endpoint: Endpoint, folder: StateFolder, podman: FakePodman, call: Call, is_allowed: bool
) -> None:
    with (
        endpoint.serve(folder, podman, kind=Application) as cloud,
        answered_directly(endpoint.url, endpoint.answer),
    ):
        s3, iam = cloud.clients.s3, cloud.clients.iam
        s3.create_bucket(Bucket="team")
        for key in ("mine/k", "other/k"):
            s3.put_object(Bucket="team", Key=key, Body=b"x")
        actions = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject"]
        bucket = "arn:aws:s3:::team"
        rights: list[dict[str, Any]] = [
            {"Effect": "Allow", "Action": actions, "Resource": f"{bucket}/mine/*"},
            {"Effect": "Allow", "Action": "s3:ListBucketMultipartUploads", "Resource": bucket},
        ]
        iam.create_instance_profile(InstanceProfileName="p")
        iam.create_role(RoleName="r", AssumeRolePolicyDocument=document([]))
        iam.put_role_policy(RoleName="r", PolicyName="x", PolicyDocument=document(rights))
        iam.add_role_to_instance_profile(InstanceProfileName="p", RoleName="r")
        act = partial(getattr(connect_node(cloud, "p"), call[0]), Bucket="team", **call[1])
        if is_allowed:
            act()
        else:
            assert refusal(act) == "AccessDenied"
            assert s3.list_objects_v2(Bucket="team")["KeyCount"] == 2


def document(statements: list[dict[str, Any]]) -> str:
    return json.dumps({"Version": "2012-10-17", "Statement": statements})
