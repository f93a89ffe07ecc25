"""The project folder as git sees it, its digest, and data folders."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from infra.errors import UsageError
from jobs.program.folder import (
    choose_folders,
    describe_left_out,
    find_project,
    list_project,
    read_data,
    read_project,
    replace_links,
)
from jobs.program.plan import collect_files


def git(folder: Path, *words: str) -> None:
    options = ("-c", "protocol.file.allow=always", "-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run(["git", *options, *words], cwd=folder, check=True, capture_output=True)


def write(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / " my project "
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
    (project / ".sprignore").write_text("notes/\n*.mp4\n/vendor/lib/less.py\n")
    write(project, "new.py", ":(x)", ":!b", "x.log", "vendor/lib/more.py", "results-of-mine/1")
    write(
        project,
        "vendor/lib/less.py",
        "film.mp4",
        *(f"nested/{n}" for n in ("n.py", "n.tmp", "film.mp4")),
    )
    git(project / "nested", "init", "--quiet")
    (project / "nested/.git/info/exclude").write_text("*.tmp\n")
    write(project, "results/table.csv")
    fetched(project, "results/run-20260731-142501-k3f", "sub/results/run-1", "sub/mine")
    assert set(list_project(project)) == {
        *("a b.py", "ü.py", "old.py", ".gitignore", ".gitmodules", ".sprignore", "link", "new.py"),
        *("vendor/lib/lib.py", "vendor/lib/more.py", "results/table.csv", "nested/n.py"),
        *(":(x)", ":!b"),
    }


def test_a_project_below_a_repository(project: Path) -> None:
    """``.sprignore`` is relative to the project, and a repository may ignore all of it."""
    write(project, "sub/a.py", "sub/notes/x", "sub/src/notes/y", "sub/gone.py")
    (project / "sub/.sprignore").write_text("/notes/\nsrc/*\n!src/notes\n/gone.py\n")
    git(project, "add", "sub/notes", "sub/gone.py")
    names = (".sprignore", "a.py", "src/notes/y")
    assert list_project(project / "sub") == names
    git(project, "rm", "-r", "--cached", ".")
    (project / ".gitignore").write_text("sub/\n")
    assert list_project(project / "sub") == names
    sent = choose_folders(str(project / "sub"), (), project, None)
    assert describe_left_out(sent, (), project) == ""


def fetched(root: Path, *folders: str) -> None:
    for folder in folders:
        write(root, f"{folder}/job/job.json", f"{folder}/model/weights")
        (root / folder / "job/job.json").write_text('{"job": "run-1"}')


def test_a_folder_without_git_is_sent_without_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "a.py", "src/__pycache__/a.pyc", ".venv/bin/python", "data/x", ".sprignore")
    (tmp_path / ".sprignore").write_text("/data/\n")
    fetched(tmp_path, "sub/results/run-1")
    assert list_project(tmp_path) == (".sprignore", "a.py")
    (tmp_path / ".sprignore").unlink()
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert list_project(tmp_path) == ("a.py", "data/x")


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
    git(project, "init", "--quiet", "nested")
    write(project, "nested/n.py")
    changes("a repository in it")
    (project / "nested/n.py").write_text("changed")
    changes("content of a repository in it")
    assert seen[-1].startswith("spr-folders/my-project-")


def test_a_file_removed_while_the_project_is_read_is_one_clear_line(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.program.folder.list_project", lambda _: ("gone.py",))
    with pytest.raises(UsageError, match=r"gone\.py: can't be read: No such file"):
        read_project(project, max_bytes=None)


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
    git(tmp_path, "init", "--quiet", "--bare", "bare")
    assert find_project(tmp_path / "bare") is None
    (project / "src" / "spr-cluster.toml").unlink()
    monkeypatch.setenv("HOME", str(project))
    assert find_project(below) is None, "a home folder in git is no project"
    (tmp_path / "home").symlink_to(project)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert find_project(below) is None


def test_a_project_too_large_names_its_largest_parts(project: Path) -> None:
    write(project, "small.py")
    (project / "weights").mkdir()
    (project / "weights" / "a.bin").write_bytes(b"0" * 3000)
    with pytest.raises(
        UsageError, match=r"2 files, 2\.9 KiB exceed 1\.0 KiB; the largest: weights"
    ):
        read_project(project, max_bytes=1024)


def test_data_keeps_its_place_in_the_project(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(project, "data/raw/x", "a.py")
    write(tmp_path, "elsewhere/y", "other/elsewhere/z", "other/a.py/z", "my $data/x")
    sent = choose_folders(None, (str(project / "data"), f"{tmp_path}/elsewhere"), project, None)
    assert sent.project is not None
    assert sent.project.names == ("a.py",)
    assert [each.target for each in sent.data] == ["work/data", "work/elsewhere"]
    assert all(each.shared for each in sent.data)
    (tmp_path / "link").symlink_to(project)
    assert read_data(f"{tmp_path}/link/data", project).target == "work/data"
    elsewhere, other = f"{tmp_path}/elsewhere", f"{tmp_path}/other"
    for taken in (
        (elsewhere, f"{other}/elsewhere"),
        (str(project / "data/raw"), str(project / "data")),
        (f"{other}/a.py",),
    ):
        with pytest.raises(UsageError, match="the job has another"):
            choose_folders(None, taken, project, None)
    assert len(choose_folders(None, (elsewhere, elsewhere), project, None).data) == 1
    write(tmp_path, ".my_data-1.2/x")
    for name, store in (("my $data", "my-data"), (".my_data-1.2", "my_data-1.2")):
        found = read_data(f"{tmp_path}/{name}", project).store
        assert found.startswith(f"spr-data/{store}-")
    monkeypatch.setenv("SPR_CLUSTER_HOME", str(tmp_path / "another machine"))
    assert read_data(f"{tmp_path}/{name}", project).store != found
    (project / "elsewhere").symlink_to(elsewhere)
    sent = choose_folders(None, (elsewhere,), project, None)
    assert sent.project
    assert sent.project.names == ("a.py", "data/raw/x"), "it takes the place of a link to it"
    for wrong in (str(project), "missing"):
        with pytest.raises(UsageError, match="--data-dir"):
            read_data(wrong, project)
    assert choose_folders("none", (), project, None).folders == ()
    with pytest.raises(UsageError, match="no such folder"):
        choose_folders("missing", (), project, None)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_repository_that_git_refuses_is_not_a_missing_one(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("LANG", "de_DE.UTF-8")
    os.chown(project, 1000, 1000)
    with pytest.raises(UsageError, match="detected dubious ownership") as caught:
        choose_folders(None, (), project, None)
    assert f"git config --global --add safe.directory '{project}'" in str(caught.value.hint)


def test_a_broken_repository_is_not_a_missing_one(project: Path) -> None:
    (project / ".git/config").write_text("[core\n")
    with pytest.raises(UsageError, match="bad config"):
        find_project(project)


def test_a_hook_of_git_leaves_its_repository_alone(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(project, "a.py", "film.mp4")
    (project / ".sprignore").write_text("*.mp4\n")
    git(project, "add", ".")
    git(project, "commit", "-m", "x")
    tree = tmp_path / "linked"
    git(project, "worktree", "add", str(tree))
    of_tree = project / ".git/worktrees/linked"
    for name, place in {"DIR": of_tree, "INDEX_FILE": of_tree / "index", "PREFIX": ""}.items():
        monkeypatch.setenv(f"GIT_{name}", str(place))
    config = (project / ".git/config").read_text()
    assert list_project(tree) == (".sprignore", "a.py")
    assert find_project(tmp_path) is None
    assert (project / ".git/config").read_text() == config


def left_out(project: Path, *data: str, files: tuple[str, ...] = ()) -> str:
    sent = choose_folders(None, [str(project / each) for each in data], project, None)
    return describe_left_out(sent, files, project)


def test_what_git_ignores_is_named_largest_first(project: Path) -> None:
    write(project, "a.py", ".env", ".venv/x", "env/pyvenv.cfg", "src/a.py")
    write(project, "src/__pycache__/a.pyc")
    write(project, "data/words.txt", "w.pt", "x.pt", "y.pt", "my notes.pt", "results/run-1/log")
    (project / "data/words.txt").write_bytes(b"0" * 3000)
    (project / "w.pt").write_bytes(b"0" * 2000)
    (project / "x.pt").write_bytes(b"0" * 1000)
    fetched(project, "out/1", "kept/1")
    write(project, "kept/1/model/z.pt")
    ignored = "data/\n*.pt\n.*\n__pycache__/\nresults/\nout/\nenv/\n"
    (project / ".gitignore").write_text(ignored)

    assert left_out(project) == (
        "not sent: data/ (ignored by git, 2.9 KiB), w.pt (ignored by git, 2.0 KiB), x.pt (ignored by git, "
        "1000 bytes) and 2 more; --data-dir sends a folder, --files a file"
    )
    assert left_out(project, "data", files=("w.pt", "x.pt", "y.pt")).startswith(
        "not sent: my notes.pt (ignored by git, 11 bytes); "
    )
    assert left_out(project, "data", files=("w.pt", "x.pt", "y.pt", "my notes.pt")) == ""


def test_a_script_in_a_plain_folder_may_lack_its_neighbors(tmp_path: Path) -> None:
    write(tmp_path, "main.py", "helper.py", "requirements.txt", "notes.md")
    sent = choose_folders(None, (), tmp_path, None)
    assert describe_left_out(sent, ("main.py",), tmp_path).startswith(
        "not sent: helper.py, requirements.txt; `--folder .` sends this folder"
    )
    assert describe_left_out(sent, (), tmp_path) == "", "no program from here"


def test_links_out_of_the_project_are_named(project: Path, tmp_path: Path) -> None:
    write(project, "real/inside.txt", "a.py")
    write(tmp_path, "outside/words.txt", "one.txt")
    links = {"inner": "real", "outer": "../outside", "one": str(tmp_path / "one.txt"), "no": "gone"}
    for name, target in links.items():
        (project / name).symlink_to(target)
    assert left_out(project).startswith(
        f"not sent: no (a link to gone), one (a link to {tmp_path}/one.txt), outer (a link to ../outside); "
    )
    sent = choose_folders(None, [str(project / "outer")], project, None)
    assert sent.project is not None
    assert "outer" not in (sent.project.names or ()), "the folder takes its place"
    files = collect_files(("python", "a.py"), ("one",), project, sent.project)
    assert files.files == {"one": tmp_path / "one.txt"}, "a file takes the place of the link"
    data = collect_files(("python", "a.py"), ("outer", "inner"), project, sent.project)
    assert sorted(data.files) == ["outer/words.txt"], "and the nodes can follow the other one"
    both = replace_links(sent, [*files.files, *data.files])
    assert both.project is not None
    names = ("a.py", "inner", "no", "real/inside.txt")
    assert both.project.names == names, "and no link is sent beside it"
    assert both.project.store != sent.project.store
    (project / "no").unlink()
    (project / "absolute").symlink_to(project / "a.py")
    assert left_out(project, "outer", files=("one",)).startswith("not sent: absolute (a link to /")
    (project / "absolute").unlink()
    (tmp_path / "outside/link").symlink_to("../one.txt")
    (tmp_path / "outside/inner").symlink_to("words.txt")
    assert left_out(project, "outer", files=("one",)) == (
        "not sent: outer/link (a link to ../one.txt); replace links in data by what they lead to"
    )


def test_a_file_is_sent_to_where_the_nodes_find_it(project: Path) -> None:
    write(project, "a.py", "real/b.py", "real/ignored.py")
    (project / "real/.gitignore").write_text("ignored.py\n")
    links = {"start.py": "a.py", "first": "second", "second": "real", "out": f"{project}/real"}
    for name, target in (links | {"last": "out/ignored.py"}).items():
        (project / name).symlink_to(target)
    sent = choose_folders(None, (), project, None)
    places = {"start.py": [], "first/b.py": [], "first/ignored.py": ["real/ignored.py"]}
    places |= {"out/b.py": ["out/b.py"], "last": ["out/ignored.py"]}
    for name, found in places.items():
        files = collect_files(("python", name), (), project, sent.project).files
        assert [*files] == found
        kept = replace_links(sent, files).project
        assert kept
        assert {"first", "second", "last"} <= {*(kept.names or ())}
