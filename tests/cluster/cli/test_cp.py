"""The places of ``cp``, and the programs that it runs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from unittest.mock import Mock

import pytest

from cluster.cli.cp import Place, build_argv, parse_place
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
    first = build_argv(*places, Path("/my home/c"), is_folder=True, recursive=True)
    assert first[0] == str(rsync)
    assert "-rlptz" in first
    assert ("--protect-args" in first) is (path == "b c")
    assert "--rsync-path=mkdir -p -- 'b c' && rsync" in first
    target = path.replace("b c", "b c/a")
    assert first[-5:] == ["-e", "ssh -F '/my home/c'", "--", "a/", f"node0:{target}"]
    del found["rsync"]
    scp = build_argv(*places, Path("/c"), is_folder=False, recursive=False)
    assert scp == ["/s", "-C", "-F", "/c", "a", "node0:b c"]
    del found["scp"]
    with pytest.raises(UsageError, match="neither rsync nor scp"):
        build_argv(*places, Path("/c"), is_folder=False, recursive=False)


@pytest.mark.parametrize(
    ("words", "codes", "repairs", "programs", "said"),
    [
        ("", [0], False, "ssh", "node0:a b is a folder\n  → -r"),
        ("", [1, 0], False, "ssh rsync -Lptz", ""),
        ("", [255], False, "ssh", "ssh failed with exit code 255"),
        ("", [255, 1, 0], True, "ssh ssh rsync -Lptz", ""),
        ("", [1, 12], False, "ssh rsync -Lptz", "12\n  → the same command continues the copy"),
        ("-r", [1, 0], False, "ssh rsync -rLptz", ""),
        ("-r", [1, 23], False, "ssh rsync -rLptz", "rsync failed with exit code 23"),
        ("-r", [0, 23], False, "ssh rsync -rlptz", "rsync says above what was not copied"),
    ],
)
def test_a_folder_needs_r(
    words: str,
    codes: list[int],
    repairs: bool,
    programs: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    assert main(["cp", str(tmp_path), "node0:"]) == 2
    assert f"{tmp_path} is a folder\n  → -r copies folders" in capsys.readouterr().err
    context, run_client = Mock(), Mock(side_effect=codes)
    context.access.repair_rule.return_value = repairs
    monkeypatch.setattr("cluster.cli.cp.open_cluster", lambda _: context)
    monkeypatch.setattr("cluster.cli.cp.run_client", run_client)
    target = tmp_path / "new/out"
    assert (main(["cp", *words.split(), "node0:a b", str(target)]) == 0) is (said == "")
    assert target.is_dir() is programs.endswith("-rlptz"), "rsync makes only one folder"
    called = [call.args[0] for call in run_client.call_args_list]
    names = [f"{Path(argv[0]).name} {argv[1]}" for argv in called]
    assert " ".join(names).replace(" -n", "") == programs
    assert called[0][1] == "-n", "the input is the caller's"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("to", ["", "node0:"])
@pytest.mark.parametrize("above", ["", "HERE/", "../HERE/"])
def test_links_to_and_out_of_a_folder_are_followed_and_those_in_it_are_kept(
    above: str, to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy(name: str) -> None:
        source = Place("", above.replace("HERE", tmp_path.name) + name)
        is_folder = Path(name).is_dir()
        if is_folder and not to:
            Path("a b/out").mkdir(parents=True, exist_ok=True)
        argv = build_argv(
            source, parse_place(f"{to}a b/out"), Path("c"), is_folder=is_folder, recursive=is_folder
        )
        code = subprocess.run(argv, check=False).returncode
        assert code == (23 if is_folder else 0)

    monkeypatch.chdir(tmp_path)
    Path("ssh").write_text('#!/bin/sh\nwhile [ "$1" != node0 ]; do shift; done\nshift\neval "$*"\n')
    Path("ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for folder in ("run", "blobs", "a b/out"):
        Path(folder).mkdir(parents=True)
    Path("blobs/b").write_text("x")
    Path("run/model").write_text("x")
    links = {"run/last": "model", "run/loop": ".", "run/dangling": "gone", "latest": "run"}
    links |= {"run/blob": "../blobs/b", "run/away": "/gone"}
    for name, target in links.items():
        Path(name).symlink_to(target)
    Path(tmp_path.name).symlink_to(".")
    copy("run/last")
    assert not Path("a b/out/last").is_symlink()
    shutil.rmtree("a b")
    for name in ("run", "latest"):
        copy(name)
        found = Path("a b/out", name)
        for file in ("", "blob", "model"):
            assert not (found / file).is_symlink()
        assert [(found / file).read_text() for file in ("blob", "model")] == ["x", "x"]
        for link in ("last", "loop", "dangling"):
            assert (found / link).readlink() == Path("run", link).readlink()
