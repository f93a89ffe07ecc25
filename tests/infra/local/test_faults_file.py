"""``spr-cluster local faults``: shown, put in force, cleared; with no server and no podman."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infra.local.state import StateFolder
from jobs.cli import main


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPR_CLUSTER_HOME", str(tmp_path / "home"))
    return tmp_path / "bad-day.toml"


def test_a_file_is_put_in_force_shown_and_cleared(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    in_force = StateFolder.of_user().faults
    assert main(["local", "faults"]) == 0
    assert capsys.readouterr().out == "no faults: everything works, and at once\n"

    file.write_text('profile = "metal"\nboot_s = 1.5\n')
    assert main(["local", "faults", str(file)]) == 0
    shown = f'# in force: {in_force}\nprofile = "metal"\nboot_s = 1.5\n'
    assert capsys.readouterr().out == shown
    assert main(["local", "faults", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["file"] == str(in_force)
    assert [told["values"][name] for name in ("boot_s", "image_s", "seed")] == [1.5, 60, 0]

    assert main(["local", "faults", "--clear"]) == 0
    assert not in_force.exists()


def test_a_wrong_file_is_refused_and_changes_nothing(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("seed = 1\n")
    assert main(["local", "faults", str(file)]) == 0
    for text in ("sed = 2\n", "seed ="):
        file.write_text(text)
        assert main(["local", "faults", str(file)]) == 2
    assert main(["local", "faults", str(file.with_name("nowhere.toml"))]) == 2
    assert "unknown key sed; did you mean seed?" in capsys.readouterr().err
    assert StateFolder.of_user().faults.read_text() == "seed = 1\n"


def test_a_broken_file_in_force_is_told(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = StateFolder.of_user()
    folder.create()
    folder.faults.write_text("boot_s = 'soon'\n")
    assert main(["local", "faults"]) == 2
    assert "boot_s = 'soon': expected" in capsys.readouterr().err
