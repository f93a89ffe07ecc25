"""The places of ``cp``, and the ports of ``ssh -L``."""

from __future__ import annotations

import subprocess
from pathlib import Path
from unittest.mock import Mock

import pytest

from cluster.cli.cp import Place, build_argv, parse_place
from cluster.cli.ssh import parse_forward
from infra.errors import UsageError
from jobs.__main__ import main


@pytest.mark.parametrize(
    ("text", "place", "word"),
    [
        ("data.csv", Place("", "data.csv"), "data.csv"),
        ("node1:a b/", Place("node1", "a b/"), "node1:a b/"),
        ("0:", Place("node0", ""), "node0:."),
        ("0:~", Place("node0", ""), "node0:."),
        ("0:~/work", Place("node0", "work"), "node0:work"),
        ("0:~other/x", Place("node0", "~other/x"), "node0:~other/x"),
        ("./node1:x", Place("", "./node1:x"), "./node1:x"),
        ("my:file", Place("", "my:file"), "./my:file"),
        ("C/a:b", Place("", "C/a:b"), "C/a:b"),
    ],
)
def test_a_place_is_on_a_node_or_here(text: str, place: Place, word: str) -> None:
    assert parse_place(text) == place
    assert str(place) == word


@pytest.mark.parametrize(
    ("usage", "path"),
    [("--protect-args, -s", "b c"), ("--secluded-args, -s", "b c"), ("[-e program]", "'b c'")],
)
def test_rsync_copies_else_scp(
    usage: str, path: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rsync = tmp_path / "rsync"
    rsync.write_text(f"#!/bin/sh\necho '{usage}'\n")
    rsync.chmod(0o755)
    found = {"rsync": str(rsync), "scp": "/s"}
    monkeypatch.setattr("shutil.which", lambda name: found.get(name))
    places = (Place("", "a"), Place("node0", "b c"))
    first = build_argv(*places, Path("/my home/c"), recursive=True)
    assert first[0] == str(rsync)
    assert "-r" in first
    assert ("--protect-args" in first) is (path == "b c")
    assert first[-5:] == ["-e", "ssh -F '/my home/c'", "--", "a", f"node0:{path}"]
    del found["rsync"]
    scp = build_argv(*places, Path("/c"), recursive=False)
    assert scp == ["/s", "-C", "-F", "/c", "a", "node0:b c"]
    del found["scp"]
    with pytest.raises(UsageError, match="neither rsync nor scp"):
        build_argv(*places, Path("/c"), recursive=False)


def test_a_folder_needs_r(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    assert main(["cp", "folder", "node0:"]) == 2
    assert "folder is a folder\n  → -r copies folders" in capsys.readouterr().err


@pytest.mark.parametrize("code", [0, 1, 255])
def test_a_nodes_folder_needs_r_as_well(
    code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    programs: list[str] = []

    def run_client(argv: list[str]) -> int:
        programs.append(Path(argv[0]).name)
        return code if programs == ["ssh"] else 0

    monkeypatch.setattr("cluster.cli.cp.open_cluster", lambda _: Mock())
    monkeypatch.setattr("cluster.cli.cp.run_client", run_client)
    assert main(["cp", "node0:a b", "."]) == (0 if code else 2)
    assert programs == (["ssh", "rsync"] if code else ["ssh"])
    assert ("node0:a b is a folder\n  → -r" in capsys.readouterr().err) is (code == 0)


def test_what_links_lead_to_is_copied(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("x")
    (tmp_path / "last").symlink_to("model")
    places = (Place("", f"{tmp_path}/last"), Place("", f"{tmp_path}/out/"))
    subprocess.run(build_argv(*places, Path("c"), recursive=False), check=True)
    assert not (tmp_path / "out/last").is_symlink()
    assert (tmp_path / "out/last").read_text() == "x"


@pytest.mark.parametrize(("code", "continues"), [(23, False), (12, True), (255, True)])
def test_only_a_lost_connection_is_continued(
    code: int, continues: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cluster.cli.cp.open_cluster", lambda _: Mock())
    monkeypatch.setattr("cluster.cli.cp.run_client", lambda _: code)
    assert main(["cp", __file__, "node0:"]) == 1
    assert ("continues the copy" in capsys.readouterr().err) is continues


def test_a_port_is_forwarded() -> None:
    assert parse_forward("8888") == "8888:localhost:8888"
    for whole in ("8888:localhost:80", "127.0.0.1:8888:10.0.0.7:80"):
        assert parse_forward(whole) == whole
