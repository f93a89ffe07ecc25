"""Which files of a program go to the nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.errors import UsageError
from jobs.program.folder import read_data
from jobs.program.plan import MAX_BYTES, collect_files, find_script


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    work = tmp_path / "work"
    names = ("train.py", "src/model.py", "src/__pycache__/model.pyc", "data/a.csv", ".git/HEAD")
    for name in names:
        path = work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("12345")
    (tmp_path / "elsewhere.txt").write_text("x")
    return work


def test_the_script_is_sent_automatically_and_no_caches(folder: Path) -> None:
    command = ("python", "-u", "train.py", "--data", "data")
    found = collect_files(command, ("src", "data/a.csv", "src/model.py"), folder)
    assert list(found.files) == ["train.py", "src/model.py", "data/a.csv"]
    assert str(found) == "3 files, 15 bytes"
    assert collect_files(("hostname",), (".",), folder).files == found.files


def test_a_file_outside_the_folder_keeps_its_name(folder: Path) -> None:
    found = collect_files(("hostname",), ("../elsewhere.txt",), folder)
    assert list(found.files) == ["elsewhere.txt"]
    (folder / "elsewhere.txt").write_text("another")
    with pytest.raises(UsageError, match=r"would both be elsewhere\.txt"):
        collect_files(("hostname",), ("../elsewhere.txt", "elsewhere.txt"), folder)
    with pytest.raises(UsageError, match="--files nothing: no such file or folder"):
        collect_files(("hostname",), ("nothing",), folder)


def test_a_link_keeps_its_name_and_a_linked_folder_is_sent_once(folder: Path) -> None:
    (folder / "link.py").symlink_to("../elsewhere.txt")
    (path,) = collect_files(("python", "link.py"), (), folder).files.items()
    assert path == ("link.py", folder.parent / "elsewhere.txt")
    (folder / "src/data").symlink_to("../data")
    (folder / "data/self").symlink_to("..")
    (folder / "data/back").symlink_to("../src")
    found = collect_files(("hostname",), ("src",), folder)
    assert sorted(found.files) == ["src/data/a.csv", "src/model.py"]


def test_files_of_a_data_folder_are_there(folder: Path) -> None:
    data = (read_data(str(folder / "data"), folder),)
    found = collect_files(("python", "-m", "src.model", "data/a.csv"), (".",), folder, data=data)
    assert sorted(found.files) == ["src/model.py", "train.py"]
    write = folder.parent / "other/data"
    write.mkdir(parents=True)
    other = (read_data(str(write), folder),)
    with pytest.raises(UsageError, match=r"of --data-dir would both be data/a\.csv"):
        collect_files(("hostname",), ("data",), folder, data=other)


@pytest.mark.parametrize(
    ("command", "script"),
    [
        (("hostname",), None),
        (("python", "-m", "src.model"), None),
        (("python", "-c", "print(1)\n" * 1000), None),
        (("./train.py", "x"), "./train.py"),
        (("bash", "/opt/x.sh"), None),
        (("nice", "python", "train.py"), "train.py"),
    ],
)
def test_which_word_is_the_script(
    folder: Path, command: tuple[str, ...], script: str | None
) -> None:
    assert find_script(command, folder) == script


def test_a_script_that_can_not_be_sent(folder: Path) -> None:
    (folder.parent / "work2.py").write_text("")
    for command in (("python", "trian.py"), ("./go", "x")):
        with pytest.raises(UsageError, match=": no such file in"):
            find_script(command, folder)
    with pytest.raises(UsageError, match=r"\.\./work2\.py is outside the working folder"):
        find_script(("python", "../work2.py"), folder)


def test_large_files_are_refused_with_the_largest_named(folder: Path) -> None:
    with (folder / "data" / "huge").open("wb") as file:
        file.truncate(MAX_BYTES + 1)  # of holes

    with pytest.raises(UsageError, match=r"4 files, 256\.0 MiB .* the largest: data 256\.0 MiB"):
        collect_files(("hostname",), (".",), folder)
    assert collect_files(("hostname",), (".",), folder, large=True).size > MAX_BYTES
