"""The file that pins a stack: its format, what is refused of it, and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.errors import UsageError
from provision.stacks.load import load_stack
from provision.stacks.lock import Pinned, lock_path, parse_lock, render_lock
from provision.stacks.stack import Stack
from tests.golden import check_golden

OWN = Path("spr-cluster.toml")
MINE = """
[stacks.mine]
base = "upstream"
python_packages = ["torch==2.13.0", "transformers==5.0.0"]
remove_packages = ["datasets", "tzdata", "scikit-learn", "peft", "accelerate", "evaluate", "boto3"]
examples = "file:///dev/null"
"""
PACKAGES = (
    Pinned("torch", "2.13.0+cpu", ("a1" * 32,)),
    Pinned("impi-rt", "2021.18.1", ("b2" * 32,)),
    Pinned("transformers", "5.0.0", ("c3" * 32, "d4" * 32)),
    Pinned("numpy", "2.3.0", ("e5" * 32,)),
)


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stack:
    """An own stack in the working folder, not locked yet."""
    monkeypatch.chdir(tmp_path)
    OWN.write_text(MINE)
    return load_stack("mine")


def write_lock(stack: Stack, old: str = "", new: str = "") -> Path:
    path = lock_path(stack.name, Path())
    path.parent.mkdir(exist_ok=True)
    path.write_text(render_lock(stack, PACKAGES).replace(old, new))
    return path


def test_the_format(mine: Stack) -> None:
    text = render_lock(mine, PACKAGES)

    check_golden(Path(__file__).parent / "golden" / "lock.txt", text)
    assert parse_lock(text, "x") == tuple(sorted(PACKAGES, key=lambda p: p.name))
    assert render_lock(mine, reversed(PACKAGES)) == text


def test_a_lock_is_found_beside_the_own_stacks(mine: Stack, tmp_path: Path) -> None:
    assert mine.lock == ()
    write_lock(mine)

    assert load_stack("mine").lock[0] == f"impi-rt==2021.18.1 --hash=sha256:{'b2' * 32}"
    assert len(load_stack("mine").lock) == 4
    assert load_stack("mine", locked=False).lock == ()
    assert load_stack("upstream").lock == ()
    # What does not decide about packages may change.
    OWN.write_text(MINE + 'summary = "another"\nenvironment = { A = "1" }\n')
    assert load_stack("mine").lock


@pytest.mark.parametrize(
    ("old", "new", "change"),
    [
        ("5.0.0", "5.1.0", "python_packages"),
        ('base = "upstream"', 'base = "upstream"\nindexes = []', "indexes"),
        ('base = "upstream"', 'base = "upstream"\npip = "25.3"', "pip"),
    ],
)
def test_an_outdated_lock_is_rejected(mine: Stack, old: str, new: str, change: str) -> None:
    write_lock(mine)
    OWN.write_text(MINE.replace(old, new))

    with pytest.raises(UsageError) as refused:
        load_stack("mine")

    result = f"spr-cluster.locks/mine.txt: the stack has changed since: {change}"
    assert refused.value.message == result
    assert refused.value.hint is not None
    assert refused.value.hint.startswith("to update it: spr-cluster stacks --check mine --lock")


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("torch==2.13.0+cpu", "torch==2.12.0+cpu", "it lacks torch==2.13.0"),
        ("torch==2.13.0+cpu", "tocrh==2.13.0+cpu", "it lacks torch==2.13.0"),
        ("numpy==", "--index-url https://evil.test/ numpy==", "line 9: '--index-url https://evil"),
        ("numpy==2.3.0", "numpy>=2.3.0", "line 9: 'numpy>=2.3.0 "),
        ("--hash=sha256:" + "e5" * 32, "", "line 9: 'numpy==2.3.0"),
        ('# python: ["3.12"]', "# python", "the stack has changed since: python"),
    ],
)
def test_an_invalid_lock_is_rejected(mine: Stack, old: str, new: str, why: str) -> None:
    write_lock(mine, old, new)

    with pytest.raises(UsageError, match=r"spr-cluster\.locks/mine\.txt") as refused:
        load_stack("mine")
    assert why in refused.value.message
    lock_path("mine", Path()).write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"spr-cluster\.locks/mine\.txt: "):
        load_stack("mine")
