"""Owners in tags: what EC2 accepts, who counts as the same, and how a table shows them."""

from __future__ import annotations

import pytest

from infra.aws.caller import Caller, is_same_owner, short_owner

_USER = "arn:aws:iam::123456789012:user/"
_ROLE = "arn:aws:sts::123456789012:assumed-role/"
_SSO = "AWSReservedSSO_"


def test_a_tag_holds_an_arn_and_a_table_shows_a_name() -> None:
    for arn, tag, name in (
        (f"{_USER}ann", f"{_USER}ann", "ann"),
        (f"{_USER}ann,b@example.com", f"{_USER}ann_b@example.com", "ann_b@example.com"),
        (f"{_USER}{'p/' * 200}ann", f"{_USER}ann", "ann"),
        (f"{_ROLE}Admin/ann=1+2", f"{_ROLE}Admin/ann=1+2", "Admin/ann=1+2"),
        (f"{_ROLE}{_SSO}A_1/ann@x.org", f"{_ROLE}{_SSO}A_1/ann@x.org", "ann@x.org"),
        ("arn:aws:iam::123456789012:root", "arn:aws:iam::123456789012:root", "root"),
    ):
        assert Caller("123456789012", arn).owner == tag
        assert short_owner(tag) == name
    assert short_owner("") == ""


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (f"{_USER}ann", f"{_USER}ann", True),
        (f"{_USER}ann", f"{_USER}bob", False),
        (f"{_USER}ann", "arn:aws:iam::210987654321:user/ann", False),
        (f"{_ROLE}Admin/ann", f"{_ROLE}Admin/bob", False),
        (f"{_ROLE}Admin/ann", f"{_ROLE}Reader/ann", False),
        # botocore generates a name for each session of a profile with role_arn.
        (f"{_ROLE}Admin/botocore-session-17", f"{_ROLE}Admin/botocore-session-18", True),
        (f"{_ROLE}Admin/botocore-session-17", f"{_ROLE}Admin/ann", False),
        # IAM Identity Center: one user with two permission sets.
        (f"{_ROLE}{_SSO}A_1/ann@x.org", f"{_ROLE}{_SSO}B_2/ann@x.org", True),
        (f"{_ROLE}{_SSO}A_1/ann@x.org", f"{_ROLE}{_SSO}A_1/bob@x.org", False),
    ],
)
def test_the_same_owner(one: str, other: str, same: bool) -> None:
    assert is_same_owner(one, other) is is_same_owner(other, one) is same
