"""The project's file: found upward, with the lines of its keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.errors import UsageError
from infra.project_file import find_project_file, read_project_file

TEXT = """\
# [cluster]
[cluster]
nodes = 4
"idle-timeout" = "1h"

[ jobs . "fine" ]
task = "squad"
env.SEED = "1"
    [jobs.fine.more]
    a . b = 1
"""


def test_the_nearest_file_upward_is_the_projects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = tmp_path / "src" / "deep"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert find_project_file() == Path("spr-cluster.toml")  # there is none
    (tmp_path / "spr-cluster.toml").write_text(TEXT)
    assert find_project_file() == tmp_path / "spr-cluster.toml"
    assert read_project_file().root == tmp_path
    (below / "spr-cluster.toml").write_text("")
    assert find_project_file() == Path("spr-cluster.toml")
    assert read_project_file().root == below
    (below / "spr-cluster.toml").unlink()
    (below / "spr-cluster.toml").symlink_to("gone.toml")
    with pytest.raises(UsageError, match=r"^spr-cluster\.toml: can't be read: No such file"):
        read_project_file()


def test_a_key_has_a_line_and_a_table_is_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("spr-cluster.toml").write_text(TEXT)
    for key, line in (
        (("cluster",), 2),
        (("cluster", "nodes"), 3),
        (("cluster", "idle-timeout"), 4),
        (("cluster", "gone"), 2),
        (("jobs", "fine", "task"), 7),
        (("jobs", "fine", "env", "SEED"), 8),
        (("jobs", "fine", "more", "a", "b"), 10),
    ):
        assert read_project_file().where(*key) == f"spr-cluster.toml:{line}"
    Path("spr-cluster.toml").write_text("\n[jobs]\nfine = 3\n")
    with pytest.raises(UsageError, match=r"^spr-cluster\.toml:3: jobs\.fine is not a table\n"):
        read_project_file().table("jobs", "fine")
