"""The embedded cloud's S3 as its nodes and the user's machine see it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from moto.s3.models import s3_backends
from werkzeug.serving import make_server

from jobs.worker.storage.client import connect
from tests.infra.local.fakes import CREDENTIALS, FakeCloud, refusal


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


def test_the_next_server_has_the_buckets_that_the_last_one_saved(fake_cloud: FakeCloud) -> None:
    s3, buckets = fake_cloud.clients.s3, fake_cloud.application.buckets
    s3.create_bucket(Bucket="team")
    s3.put_object(Bucket="team", Key="a/b c", Body=b"model", Metadata={"job": "squad-1"})
    buckets.save()
    s3_backends.clear()
    s3_backends.bucket_accounts.clear()
    assert refusal(s3.head_bucket, Bucket="team") == "404"

    buckets.load()

    found = s3.get_object(Bucket="team", Key="a/b c")
    assert (found["Body"].read(), found["Metadata"]) == (b"model", {"job": "squad-1"})
