"""A bucket with its own KMS key: found before anything is bought, and usable by the nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infra.aws.roles import render_document
from infra.errors import UsageError
from infra.iam.bucket_access import check_buckets
from infra.iam.instance_profile import node_rights
from infra.local.api.bucket_server import S3Call
from infra.local.api.policy import Request, parse_policy
from infra.spec import build_spec
from tests.cluster.cli.test_doctor import deny, examine
from tests.harness.cloud import make_cloud
from tests.harness.command_line import CommandLine
from tests.infra.local.fakes import connect_node

ID, OTHER = "01234567-89ab-cdef", "arn:aws:kms:us-east-1:123456789012:key/another"
KEY = f"arn:aws:kms:us-east-1:123456789012:key/{ID}"
BUCKET, READ = ("--bucket", "s3://team-b/results"), ("--read-from", "s3://team-b/in")
UP = ("up", "--nodes", "1", "--yes")


Encrypt = Callable[[str | None], None]


@pytest.fixture
def encrypt(line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> Encrypt:
    """Make the bucket, with a default key, or with S3's own encryption."""

    def make(key: str | None) -> None:
        s3 = line.cloud.fake.clients.s3
        s3.create_bucket(Bucket="team-b")
        if key is not None:
            encrypt_buckets(s3, key, monkeypatch)

    return make


def encrypt_buckets(s3: Any, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have S3 encrypt with a key: all requests for objects need permission for it."""
    default = {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": key}
    rules = {"Rules": [{"ApplyServerSideEncryptionByDefault": default}]}
    s3.put_bucket_encryption(Bucket="team-b", ServerSideEncryptionConfiguration=rules)
    arn = f"arn:aws:kms:us-east-1:123456789012:key/{key.rpartition('/')[2]}"
    via = {"kms:ViaService": "s3.us-east-1.amazonaws.com"}
    actions = {"s3:PutObject": "kms:GenerateDataKey", "s3:GetObject": "kms:Decrypt"}
    plain = S3Call.permissions

    def permissions(call: S3Call) -> tuple[Request, ...]:
        (request,) = plain(call)
        action = actions.get(request.action)
        return (request, Request(action, arn, via)) if action else (request,)

    # Everyone who may use S3 may use the key that AWS manages for it.
    if not key.endswith("alias/aws/s3"):
        monkeypatch.setattr(S3Call, "permissions", permissions)


def look(line: CommandLine, account: str = "", **options: Any) -> list[str]:
    """What may be wrong with a cluster's buckets."""
    spec = build_spec(name="spr", ssh_cidrs=("192.0.2.1/32",), **options)
    fake = line.cloud.fake
    clients: Any = SimpleNamespace(s3=fake.clients.s3, caller=fake.clients.caller)
    if account:
        clients.caller = replace(clients.caller, account=account)
    return list(check_buckets(clients, spec, make_cloud(fake.endpoint.url)))


def test_a_key_that_the_nodes_could_not_use_is_found_before_anything_is_made(
    line: CommandLine, encrypt: Encrypt
) -> None:
    encrypt(KEY)

    code, found = examine(line, *BUCKET)
    assert code == 1
    assert f"--bucket-kms-key {KEY}" in found["bucket"]["remedy"]
    refused = line.run(*UP, *BUCKET)

    assert refused.code == 2
    assert f"encrypts with KMS key {KEY}" in refused.message
    assert f"--bucket-kms-key {KEY}" in refused.message
    assert line.cloud.left() == []


@pytest.mark.parametrize(
    ("key", "given", "fix"),
    [
        (KEY, {"bucket": "s3://team-b", "bucket_kms_key": OTHER}, f"--bucket-kms-key {KEY}"),
        (ID, {"bucket": "s3://team-b"}, f"aws kms describe-key --key-id {ID}"),
        ("alias/mine", {"bucket": "s3://team-b"}, "aws kms describe-key --key-id alias/mine"),
        (None, {"bucket": "s3://team-b"}, ""),
        (None, {"read_from": ("s3://team-b/in",)}, ""),
        ("alias/aws/s3", {"bucket": "s3://team-b"}, ""),
        (
            KEY,
            {"bucket": "s3://team-b", "read_from": ("s3://team-b/in",), "bucket_kms_key": KEY},
            "",
        ),
        (ID, {"bucket": "s3://team-b", "bucket_kms_key": KEY}, ""),
        # Nobody looks which key has the alias.
        ("alias/mine", {"bucket": "s3://team-b", "bucket_kms_key": KEY}, ""),
    ],
)
def test_the_key_that_the_nodes_need_must_be_given(
    line: CommandLine, encrypt: Encrypt, key: str | None, given: dict[str, Any], fix: str
) -> None:
    encrypt(key)

    if not fix:
        assert look(line, **given) == []
        return
    with pytest.raises(UsageError, match=f"encrypts with KMS key {key}") as caught:
        look(line, **given)
    assert fix in (caught.value.hint or "")


def test_the_key_of_a_bucket_to_read_from_is_only_mentioned(
    line: CommandLine, encrypt: Encrypt
) -> None:
    encrypt(KEY)

    code, found = examine(line, *READ)

    assert (code, found["bucket"]["verdict"]) == (0, "warn")
    assert "decrypt, use --instance-profile NAME" in found["bucket"]["found"]
    assert f"encrypts with KMS key {KEY}" in line.must("up", "--dry-run", *READ).out


def test_the_nodes_write_and_read_with_the_buckets_key(line: CommandLine, encrypt: Encrypt) -> None:
    encrypt(KEY)

    line.must(*UP, *BUCKET, "--bucket-kms-key", KEY)

    s3 = connect_node(line.cloud.fake, "spr-cluster-spr-us-east-1-s3")
    s3.put_object(Bucket="team-b", Key="results/a", Body=b"a")
    assert s3.get_object(Bucket="team-b", Key="results/a")["Body"].read() == b"a"
    # The cluster remembers the key.
    line.must("repair", "--yes")
    line.must("down", "--yes")
    assert line.cloud.left() == []


@pytest.mark.parametrize(
    ("given", "needed"), [(BUCKET, "--bucket-kms-key"), (READ, "--instance-profile")]
)
def test_credentials_that_may_not_see_it_are_told_what_to_give(
    line: CommandLine, encrypt: Encrypt, tmp_path: Path, given: tuple[str, ...], needed: str
) -> None:
    encrypt(KEY)
    deny(line, tmp_path, "s3:GetEncryptionConfiguration", "*")

    assert f"{needed} is needed" in examine(line, *given)[1]["bucket"]["found"]
    assert f"{needed} is needed" in line.must("up", "--dry-run", *given).out


def test_a_bucket_that_keeps_replaced_checkpoints_without_end_is_mentioned(
    line: CommandLine, encrypt: Encrypt, tmp_path: Path
) -> None:
    encrypt(None)
    s3 = line.cloud.fake.clients.s3
    s3.put_bucket_versioning(Bucket="team-b", VersioningConfiguration={"Status": "Enabled"})
    still = "each replaced checkpoint is still stored"

    assert still in line.must("up", "--dry-run", *BUCKET).out
    assert examine(line, *BUCKET)[1]["bucket"]["verdict"] == "warn"
    assert look(line, read_from=("s3://team-b/in",)) == []
    foreign = "".join(look(line, "111122223333", bucket="s3://team-b"))
    assert "another account owns" in foreign
    foreign = "".join(look(line, "111122223333", bucket="s3://team-b", instance_profile="mine"))
    assert "is needed" not in foreign
    for prefix, is_said in (("logs/", True), ("", False), ("results", False)):
        rule = {"ID": "old", "Status": "Enabled", "Filter": {"Prefix": prefix}}
        rules: Any = [{**rule, "NoncurrentVersionExpiration": {"NoncurrentDays": 3}}]
        s3.put_bucket_lifecycle_configuration(
            Bucket="team-b", LifecycleConfiguration={"Rules": rules}
        )
        assert (still in "".join(look(line, bucket="s3://team-b/results"))) is is_said
    for action in ("s3:GetBucketVersioning", "s3:GetLifecycleConfiguration"):
        deny(line, tmp_path, action, "*")
        assert look(line, bucket="s3://team-b") == []


def test_the_buckets_to_read_from_exist_and_one_elsewhere_is_mentioned(line: CommandLine) -> None:
    s3 = line.cloud.fake.clients.s3
    s3.create_bucket(Bucket="far", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})

    refused = line.run(*UP, "--read-from", "s3://far,s3://mistyped/in")

    assert refused.code == 2
    assert "--read-from s3://mistyped/in: bucket 'mistyped' does not exist" in refused.message
    assert line.cloud.left() == []
    shown = line.must("up", "--dry-run", "--read-from", "s3://far").out
    assert "--read-from s3://far: the bucket is in eu-west-1" in shown


@pytest.mark.parametrize(
    ("action", "place", "may"),
    [
        ("ListBucketMultipartUploads", "team-b", True),
        ("ListBucketMultipartUploads", "team-c", False),
        ("GetObject", "team-c/train.json", True),
        ("GetObject", "team-c/train.json/part", True),
        ("GetObject", "team-c/train.json.old", False),
        ("PutObject", "team-c/train.json", False),
    ],
)
def test_the_nodes_may_find_unfinished_uploads_and_read_objects(
    action: str, place: str, may: bool
) -> None:
    options = {"bucket": "s3://team-b/results", "read_from": ("s3://team-c/train.json",)}
    spec = build_spec(name="spr", ssh_cidrs=("192.0.2.1/32",), **options)
    policy = parse_policy(render_document(*node_rights(spec, "aws")), "the role's")

    assert policy.allows(Request(f"s3:{action}", f"arn:aws:s3:::{place}", {})) is may
