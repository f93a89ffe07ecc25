"""Where compiled code is kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch._functorch.config
from torch._inductor import codecache
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

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


@pytest.mark.parametrize("own_default", [False, True])
def test_compiled_code_is_kept_in_a_folder_for_each_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_default: bool
) -> None:
    for count, flags in enumerate(({"avx2"}, {"avx2", "avx512f"}), start=1):
        if own_default:
            monkeypatch.setenv(NAME, default_cache_dir())
        else:
            monkeypatch.delenv(NAME, raising=False)
        monkeypatch.setattr(compilation, "read_cpu_flags", lambda flags=flags: flags)
        keep_compiled(tmp_path / "new")
        folder = Path(os.environ[NAME])
        assert folder in [*(tmp_path / "new").iterdir()]
        assert len([*(tmp_path / "new").iterdir()]) == count
        assert torch._functorch.config.autograd_cache_allow_custom_autograd_functions
        assert Path(codecache._HEADER_DIR) == folder / "precompiled_headers"
        assert Path(codecache._HEADER_LOCK_DIR) == folder / "precompiled_headers/locks"


def test_a_users_own_folder_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "/mine")
    keep_compiled(tmp_path)
    assert os.environ[NAME] == "/mine"
    assert codecache._HEADER_DIR.startswith("/torch's own")


def test_without_a_folder_it_stays_where_torch_keeps_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    keep_compiled(tmp_path / "file" / "folder")
    keep_compiled(Path("~no-such-user/folder"))
    assert NAME not in os.environ
