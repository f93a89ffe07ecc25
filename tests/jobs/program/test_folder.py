"""The project folder as git sees it, its digest, and data folders."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from infra.errors import UsageError
from jobs.program.folder import choose_folders, find_project, list_project, read_data, read_project


def git(folder: Path, *words: str) -> None:
    options = ("-c", "protocol.file.allow=always", "-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run(["git", *options, *words], cwd=folder, check=True, capture_output=True)


def write(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "my project"
    root.mkdir()
    git(root, "init", "--quiet")
    return root


def test_a_project_is_what_git_tracks_or_would_add(project: Path, tmp_path: Path) -> None:
    library = tmp_path / "library"
    library.mkdir()
    git(library, "init", "--quiet")
    write(library, "lib.py")
    git(library, "add", ".")
    git(library, "commit", "-m", "x")
    git(project, "submodule", "add", str(library), "vendor/lib")
    write(project, "a b.py", "ü.py", "notes/big.csv", "old.py", "gone.py", ".gitignore")
    (project / ".gitignore").write_text("*.log\nresults-of-mine/\n")
    git(project, "add", ".")
    git(project, "commit", "-m", "x")
    (project / "gone.py").unlink()
    (project / "link").symlink_to("a b.py")
    (project / ".sprignore").write_text("notes/\n*.mp4\n")
    write(project, "new.py", "x.log", "film.mp4", "vendor/lib/more.py", "results-of-mine/1")
    write(project, "results/run-20260731-142501-k3f/log", "results/table.csv")
    assert set(list_project(project)) == {
        *("a b.py", "ü.py", "old.py", ".gitignore", ".gitmodules", ".sprignore", "link", "new.py"),
        *("vendor/lib/lib.py", "vendor/lib/more.py", "results/table.csv"),
    }


def test_a_folder_without_git_is_sent_without_caches(tmp_path: Path) -> None:
    write(tmp_path, "a.py", "src/__pycache__/a.pyc", ".venv/bin/python", "data/x", ".sprignore")
    (tmp_path / ".sprignore").write_text("/data/\n")
    assert list_project(tmp_path) == (".sprignore", "a.py")


def test_the_digest_is_that_of_names_modes_and_contents(project: Path) -> None:
    write(project, "a.py", "b.py")
    seen = [read_project(project, max_bytes=None).store]

    def changes(what: str) -> None:
        store = read_project(project, max_bytes=None).store
        assert store not in seen, what
        seen.append(store)

    (project / "a.py").write_text("A.py")  # the same size
    changes("content")
    (project / "a.py").chmod(0o755)
    changes("mode")
    (project / "a.py").rename(project / "c.py")
    changes("name")
    (project / "b.py").unlink()
    (project / "b.py").symlink_to("c.py")
    changes("kind")
    os.utime(project / "c.py", (1, 1))
    assert read_project(project, max_bytes=None).store == seen[-1]
    assert seen[-1].startswith("spr-folders/my-project-")


def test_the_project_is_found_upward(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = project / "src" / "deep"
    below.mkdir(parents=True)
    assert find_project(below) == project
    write(project, "src/spr-cluster.toml")
    assert find_project(below) == project / "src"
    assert choose_folders(None, (), below, None).subfolder == "deep"
    assert find_project(tmp_path) is None
    (project / "src" / "spr-cluster.toml").unlink()
    monkeypatch.setenv("HOME", str(project))
    assert find_project(below) is None, "a home folder in git is no project"


def test_a_project_too_large_names_its_largest_parts(project: Path) -> None:
    write(project, "small.py")
    (project / "weights").mkdir()
    (project / "weights" / "a.bin").write_bytes(b"0" * 3000)
    with pytest.raises(
        UsageError, match=r"2 files, 2\.9 KiB exceed 1\.0 KiB; the largest: weights"
    ):
        read_project(project, max_bytes=1024)


def test_data_keeps_its_place_in_the_project(project: Path, tmp_path: Path) -> None:
    write(project, "data/raw/x", "a.py")
    write(tmp_path, "elsewhere/y")
    sent = choose_folders(None, (str(project / "data"), f"{tmp_path}/elsewhere"), project, None)
    assert sent.project is not None
    assert sent.project.names == ("a.py",)
    assert [each.target for each in sent.data] == ["work/data", "work/elsewhere"]
    assert all(each.shared for each in sent.data)
    for wrong in (str(project), "missing"):
        with pytest.raises(UsageError, match="--data-dir"):
            read_data(wrong, project)
    assert choose_folders("none", (), project, None).folders == ()
    with pytest.raises(UsageError, match="no such folder"):
        choose_folders("missing", (), project, None)
