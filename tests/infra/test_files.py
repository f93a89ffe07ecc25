"""Readers of files: what they refuse, and how they say it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infra.errors import UsageError
from infra.files import check_file, check_folder, parse_object, parse_toml, read_lines, read_text


@pytest.mark.timeout(10)
def test_a_folder_is_searched_for_what_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/file").touch()
    check_folder(tmp_path)
    os.mkfifo(tmp_path / "a/b/pipe")
    with pytest.raises(UsageError, match="a/b/pipe: is a pipe"):
        check_folder(tmp_path)


def test_a_missing_file_has_a_default(tmp_path: Path) -> None:
    assert read_text(tmp_path / "none", "default") == "default"
    with pytest.raises(UsageError, match="none: can't be read: No such file or directory"):
        read_text(tmp_path / "none")
    with pytest.raises(UsageError, match=r"can't be read: .*embedded null"):
        check_file(Path("a\0b"))


def test_a_file_has_a_largest_size(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("1\n2\n3")
    assert [*read_lines(tmp_path / "file", 5)] == ["1\n", "2\n", "3"]
    with pytest.raises(UsageError, match="file: file is too large: 5 bytes, limit 4 bytes"):
        next(read_lines(tmp_path / "file", 4))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a":' * 101 + "1" + "}" * 101, "more than 100 levels"),
        ("[" * 100_000, "more than 100 levels"),
        ("9" * 5000, "a number has too many digits"),
        ("{", r"not JSON: .* \(line 1, column 2\)"),
        ("[]", "expected a JSON object"),
    ],
    ids=["deep", "deeper", "long", "text", "list"],
)
def test_json_that_could_harm_its_user_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"^a.json: .*{message}"):
        parse_object(text, "a.json")
    assert parse_object('{"a":' * 99 + "[]" + "}" * 99, "a.json")


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = " + "[" * 100_000, "more than 100 levels"),
        ("a = " + "[" * 100 + "]" * 100, "more than 100 levels"),
        ("[a" + ".a" * 100_000 + "]", "more than 100 levels"),
        ("a" + '."a"' * 100_000 + " = 1", "more than 100 levels"),
        ("a = ", "not TOML: Invalid value"),
    ],
    ids=["deeper", "array", "table", "quoted", "text"],
)
def test_toml_that_could_harm_its_user_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"^a.toml: .*{message}"):
        parse_toml(text, "a.toml")
    # A text may have many dots.
    dots = "." * 200
    assert parse_toml(f'a = """\n{dots}"""', "a.toml") == {"a": dots}
