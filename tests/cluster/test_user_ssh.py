"""The line in the user's SSH configuration."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from cluster import user_ssh
from cluster.ssh_mesh import render_client_ssh_config
from tests.cluster.test_ssh_mesh import CLUSTER


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SPR_CLUSTER_HOME", str(tmp_path / "my clusters"))
    return tmp_path


def shown(folder: Path, host: str) -> dict[str, str]:
    """What OpenSSH would use for a host."""
    argv = ["ssh", "-F", str(folder / ".ssh/config"), "-G", host]
    lines = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()
    return dict(line.split(" ", 1) for line in lines if " " in line)


def test_one_line_makes_the_nodes_known_and_nothing_else(folder: Path) -> None:
    assert user_ssh.add_include()
    config = folder / ".ssh/config"
    line = f'Include "{folder}/my clusters/ssh_config"\n'
    assert config.read_text() == f"# spr-cluster ssh --setup\n{line}"
    assert (config.stat().st_mode & 0o777, config.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    known = ("/key", "/known", "eu-west-1")
    hosts = folder / "my clusters/bert/ssh_hosts"
    hosts.parent.mkdir()
    hosts.write_text(render_client_ssh_config(CLUSTER, *known, "bert-"))
    node = CLUSTER.nodes[1]
    found = shown(folder, "bert-node1")
    assert (found["hostname"], found["hostkeyalias"]) == (node.address, node.instance.id)
    assert (found["identityfile"], found["stricthostkeychecking"]) == ("/key", "accept-new")
    assert shown(folder, "node1")["hostname"] == "node1"
    assert shown(folder, "bert-node77")["identityfile"] != "/key"
    assert user_ssh.remove_include()
    assert config.read_text() == ""
    assert not user_ssh.remove_include()


@pytest.mark.parametrize("before", ["Host x\n    User y", "Host x\r\n    User \xe9\r\n"])
def test_the_users_own_lines_stay_as_they_are(before: str, folder: Path) -> None:
    real = folder / "dotfiles"
    real.write_bytes(before.encode("latin-1"))
    (folder / ".ssh").mkdir()
    (folder / ".ssh/config").symlink_to(real)
    other = folder / "dotfiles.new"
    other.write_text("the user's")
    assert user_ssh.add_include()
    assert not user_ssh.add_include(), "once is enough"
    assert (folder / ".ssh/config").is_symlink()
    written = real.read_bytes()
    assert written.split(b"\n", 2)[2] == before.encode("latin-1")
    if "\r" in before:  # an editor writes all lines alike
        real.write_bytes(written.replace(b"\n", b"\r\n", 2))
    assert user_ssh.remove_include()
    assert real.read_bytes() == before.encode("latin-1")
    assert other.read_text() == "the user's"


@pytest.mark.parametrize("mark", [True, False])
def test_a_line_of_an_earlier_place_or_release_is_replaced(
    mark: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, own = folder / ".ssh/config", f'Include "{folder}/other/ssh_config"\n'
    user_ssh.add_include()
    if not mark:
        config.write_text(config.read_text().split("\n", 1)[1])
    config.write_text(config.read_text() + own)
    if mark:
        monkeypatch.setenv("SPR_CLUSTER_HOME", str(folder / "moved"))
        (folder / "my clusters/ssh_config").unlink()
        config.write_text(f"# spr-cluster ssh --setup\n{own}{config.read_text()}")
        own = f"# spr-cluster ssh --setup\n{own}{own}"  # of another folder, which is still there
        (folder / "other").mkdir()
        (folder / "other/ssh_config").touch()
    assert user_ssh.add_include() is mark
    assert config.read_text().count("Include") == 2 + mark
    assert ('moved/ssh_config"' in config.read_text()) is mark
    assert user_ssh.remove_include()
    assert config.read_text() == own


def test_it_is_offered_once(folder: Path) -> None:
    (folder / "my clusters").mkdir()
    assert "ssh --setup" in user_ssh.offer_once()
    assert user_ssh.offer_once() == ""
    assert not (folder / ".ssh").exists()
