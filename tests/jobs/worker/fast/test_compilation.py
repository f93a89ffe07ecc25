"""Where compiled code is kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch._functorch.config
from torch._inductor import codecache

from jobs.worker.fast import compilation
from jobs.worker.fast.compilation import keep_compiled

NAME = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "")
    monkeypatch.delenv(NAME)
    traced = "autograd_cache_allow_custom_autograd_functions"
    monkeypatch.setattr(torch._functorch.config, traced, False)
    for name in ("_HEADER_DIR", "_HEADER_LOCK_DIR"):
        monkeypatch.setattr(codecache, name, f"/torch's own/{name}")


def test_compiled_code_is_kept_in_the_folder(tmp_path: Path) -> None:
    keep_compiled(tmp_path / "new")
    (folder,) = (tmp_path / "new").iterdir()
    assert os.environ[NAME] == str(folder)
    assert torch._functorch.config.autograd_cache_allow_custom_autograd_functions
    assert Path(codecache._HEADER_DIR) == folder / "precompiled_headers"
    assert Path(codecache._HEADER_LOCK_DIR) == folder / "precompiled_headers/locks"


def test_processors_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for flags in ({"avx2"}, {"avx2", "avx512f"}):
        monkeypatch.delenv(NAME, raising=False)
        monkeypatch.setattr(compilation, "read_cpu_flags", lambda flags=flags: flags)
        keep_compiled(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_users_own_folder_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "/mine")
    keep_compiled(tmp_path)
    assert os.environ[NAME] == "/mine"
    assert codecache._HEADER_DIR.startswith("/torch's own")


def test_torchs_own_default_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setenv(NAME, default_cache_dir())
    keep_compiled(tmp_path)
    assert Path(os.environ[NAME]).parent == tmp_path


def test_without_a_folder_it_stays_where_torch_keeps_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    keep_compiled(tmp_path / "file" / "folder")
    keep_compiled(Path("~no-such-user/folder"))
    assert NAME not in os.environ
