"""`stacks --check --lock`, and what all other commands make of a lock."""

from __future__ import annotations

import errno
import hashlib
import json
from pathlib import Path

import pytest

from provision.bake import recipe_digest
from provision.stacks.load import load_stack
from tests.cluster.cli.test_stacks import OWN, index, run
from tests.provision.package_index import PackageIndex

__all__ = ["index"]
LOCK = Path("spr-cluster.locks/mine.txt")
_UPDATE = (
    "to update it: spr-cluster stacks --check mine --lock. Without the file, every node resolves the "
    "packages itself"
)


def test_a_lock_has_every_package_with_its_hash(
    capsys: pytest.CaptureFixture[str], index: PackageIndex
) -> None:
    index.add("transformers", "5.0.0", needs=["tokenizers"])
    index.add("tokenizers", "0.22.0")
    unlocked = recipe_digest(load_stack("mine"))

    code, out, err = run(capsys, "stacks", "--check", "mine", "--lock")

    wrote = f"mine: wrote {LOCK}: 4 packages with hashes, for Python 3.12 on Ubuntu 24.04\n"
    assert (code, out) == (0, wrote)
    assert "Lock stack mine" in err
    wheel = index.pages["/tokenizers/"]["tokenizers-0.22.0-py3-none-any.whl"]
    digest = hashlib.sha256(wheel).hexdigest()
    assert f"tokenizers==0.22.0 --hash=sha256:{digest}" in LOCK.read_text().splitlines()
    assert recipe_digest(load_stack("mine")) != unlocked


def test_stacks_shows_whether_there_is_a_lock(
    capsys: pytest.CaptureFixture[str], index: PackageIndex
) -> None:
    def stack_state() -> tuple[str, dict[str, object]]:
        _, out, _ = run(capsys, "stacks")
        line = next(text for text in out.split("mine: ")[1].splitlines() if "lock " in text)
        (mine,) = [s for s in json.loads(run(capsys, "stacks", "--json")[1]) if s["name"] == "mine"]
        return line.removeprefix("  lock").strip(), mine

    line, before = stack_state()
    assert line == "none; to pin all packages by hash: spr-cluster stacks --check mine --lock"
    assert (before["lock"], before["lock_problem"]) == (None, "")

    (report,) = json.loads(run(capsys, "stacks", "--check", "mine", "--lock", "--json")[1])
    assert (report["lock"], report["ok"]) == (str(LOCK), True)
    assert report["resolved"]["torch"] == "2.13.0+cpu"
    line, after = stack_state()
    assert line == f"3 packages pinned by hash, in {LOCK}"
    assert len(after["lock"]) == 3  # type: ignore[arg-type]
    assert after["digest"] != before["digest"]

    Path("spr-cluster.toml").write_text(OWN.replace("5.0.0", "5.0.1"))
    line, _ = stack_state()
    why = f"{LOCK}: the stack has changed since: python_packages"
    assert line == f"rejected: {why} (to update it: spr-cluster stacks --check mine --lock)"


def test_an_outdated_lock_is_rejected_before_anything_is_bought(
    capsys: pytest.CaptureFixture[str], index: PackageIndex
) -> None:
    run(capsys, "stacks", "--check", "mine", "--lock")
    Path("spr-cluster.toml").write_text(OWN.replace("5.0.0", "5.0.1"))

    for argv in ("up --yes", "up --dry-run", "bake --yes"):
        code, out, err = run(capsys, *argv.split(), "--stack", "mine")

        assert (code, out) == (2, "")
        why = f"{LOCK}: the stack has changed since: python_packages"
        assert err == f"spr-cluster: {why}\n  → {_UPDATE}\n"
    index.add("transformers", "5.0.1")
    assert run(capsys, "stacks", "--check", "mine", "--lock")[0] == 0
    assert load_stack("mine").lock


def test_a_missing_package_or_a_full_disk_leaves_the_lock(
    capsys: pytest.CaptureFixture[str], index: PackageIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.statuses["/torch/"] = 503
    code, out, _ = run(capsys, "stacks", "--check", "mine", "--lock", "--json")
    (result,) = json.loads(out)
    assert (code, result["ok"], result["lock"], LOCK.exists()) == (1, False, None, False)
    index.statuses.clear()
    run(capsys, "stacks", "--check", "mine", "--lock")
    before = LOCK.read_text()

    def fill(path: Path, text: str) -> None:
        with path.open("w") as file:
            file.write(text[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fill)
    code, _, err = run(capsys, "stacks", "--check", "mine", "--lock")

    assert code == 2
    assert f"{LOCK}: No space left on device" in err
    assert LOCK.read_text() == before
    assert [*LOCK.parent.iterdir()] == [LOCK]
