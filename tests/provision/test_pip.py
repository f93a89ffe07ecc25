"""pip's words, read; and the pip that is found."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from infra.errors import SprError
from provision.pip import Pip, explain, find_pip


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        (
            "INFO: pip is looking\nERROR: Cannot install a==1 and b==2 because ...\n\n"
            "The conflict is caused by:\n    The user requested a==1\n    b 2 depends on a==2\n\n"
            "To fix this you could try to:\n1. loosen\n",
            "these don't fit together: The user requested a==1; b 2 depends on a==2",
        ),
        (
            "ERROR: Could not find a version that satisfies the requirement libfabric>=2.6 "
            "(from impi-rt) (from versions: none)\nERROR: No matching distribution found\n",
            "impi-rt needs libfabric>=2.6, which no index has",
        ),
        (
            "ERROR: Could not find a version that satisfies the requirement b==9 "
            "(from versions: 1, 2, 3, 4, 5, 6)\n",
            "b==9, which no index has; there is 6, 5, 4, 3, 2",
        ),
        ("ERROR: first\nnoise\nERROR: disk full\n", "disk full"),
        ("", "pip failed without a reason"),
    ],
)
def test_a_failure_is_one_sentence(output: str, sentence: str) -> None:
    assert explain(output).error == sentence


def fake_pip(folder: Path, body: str) -> Path:
    path = folder / "pip3"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_a_pip_that_is_too_old_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fake_pip(tmp_path, "echo pip 22.0.2 from /usr/lib")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", f"{tmp_path}:/nowhere")

    with pytest.raises(SprError, match=rf"no pip from 22.2 on here \({path} is pip 22.0\)"):
        find_pip()


def test_a_pip_beside_the_tool_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fake_pip(tmp_path, "echo pip 24.1 from /usr/lib")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    assert find_pip().command == (str(path),)


def test_a_pip_that_need_not_download_is_preferred(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = fake_pip(tmp_path, "echo pip 25.0.1 from /x"), tmp_path / "pip"
    new.write_text("#!/bin/sh\necho pip 25.3 from /y\n")
    new.chmod(0o755)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    assert find_pip().command == (str(new),)
    new.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_pip().command == (str(old),)
    assert find_pip().downloads


def test_a_machines_own_configuration_is_known(tmp_path: Path) -> None:
    lines = (
        "global.extra-index-url='file:///a https://b/'\\nglobal.index-url='https://mirror/simple'\\n"
        ":env:.find-links='/wheels'\\n:env:.index-url='https://nearer/simple'"
    )
    path = fake_pip(tmp_path, f'printf "{lines}\\n"')

    pip = Pip((str(path),))

    assert pip.main_index() == "https://nearer/simple"
    assert pip.configured_sources() == ("file:///a", "https://b/", "/wheels")
    assert Pip((str(path),), isolated=True).main_index() == "https://pypi.org/simple"
    assert Pip((str(path),), isolated=True).configured_sources() == ()
