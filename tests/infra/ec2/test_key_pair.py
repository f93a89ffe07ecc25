"""The key pair: only its owner can read the private key file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infra.ec2.key_pair import generate_key_pair, read_public
from infra.files import write_private


def test_a_key_pair_never_shows_its_private_half_and_the_file_has_its_public_one(
    tmp_path: Path,
) -> None:
    pair, path = generate_key_pair("me"), tmp_path / "key"
    assert "PRIVATE KEY" in pair.private
    assert "PRIVATE" not in repr(pair)
    assert generate_key_pair("me").private != pair.private

    write_private(path, pair.private)
    assert pair.public == f"{read_public(path)} me"
    for content in ("", "no key", "-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n"):
        path.write_text(content)
        assert [read_public(each) for each in (path, tmp_path / "none", tmp_path)] == [""] * 3


def test_only_the_owner_can_read_what_is_private(tmp_path: Path) -> None:
    path = tmp_path / "home" / "bert" / "id_ed25519"
    before = os.umask(0)
    try:
        write_private(path, "secret")
        write_private(path, "another secret")
    finally:
        os.umask(before)

    assert path.read_text() == "another secret"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert [entry.name for entry in path.parent.iterdir()] == ["id_ed25519"]


def test_a_crash_leaves_the_old_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    write_private(path, "old")

    def crash(_: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", crash)
        with pytest.raises(KeyboardInterrupt):
            write_private(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    write_private(path, "newer")
    assert path.read_text() == "newer"
