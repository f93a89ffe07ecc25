from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest

from jobs.worker.runtime import process
from jobs.worker.runtime.errors import StoppedError, WorkerError
from jobs.worker.runtime.process import abort_all, explain_kill, listen, read_identity
from jobs.worker.runtime.ranks import CCL_MODULE, choose_backend, lost_peer


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"PMI_RANK": "0"}, "PMI_RANK and PMI_SIZE are not both set to numbers"),
        ({"PMI_RANK": "x", "PMI_SIZE": "2"}, "PMI_RANK and PMI_SIZE are not both set to numbers"),
        ({"PMI_RANK": "2", "PMI_SIZE": "2"}, "PMI_RANK 2 does not fit PMI_SIZE 2"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "MASTER_ADDR is not set"),
    ],
)
def test_an_incomplete_environment_is_an_error(environ: dict[str, str], message: str) -> None:
    with pytest.raises(WorkerError, match=message):
        read_identity(environ)


def test_an_explicit_backend_never_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, CCL_MODULE, None)  # makes its import fail
    assert choose_backend("gloo").name == "gloo"
    fallback = choose_backend("auto")
    assert fallback.name == "gloo"
    assert CCL_MODULE in fallback.reason
    with pytest.raises(WorkerError, match=f"--backend ccl needs {CCL_MODULE}"):
        choose_backend("ccl")
    monkeypatch.setitem(sys.modules, CCL_MODULE, ModuleType(CCL_MODULE))
    assert choose_backend("auto").name == choose_backend("ccl").name == "ccl"
    assert choose_backend("gloo").name == "gloo"


def test_a_lost_peer_is_distinguished_from_this_ranks_failure() -> None:
    gloo = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"
    assert lost_peer(RuntimeError(gloo))
    assert not lost_peer(RuntimeError("shape mismatch"))
    assert not lost_peer(OSError("gloo/ is a folder"))


def test_abort_writes_to_mpiruns_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "ABORT_SECONDS", 0)
    read_end, write_end = os.pipe()
    abort_all({"PMI_FD": str(write_end)})
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        assert pipe.read() == "cmd=abort exitcode=1\n"
    abort_all({"PMI_FD": str(write_end)})  # mpirun is gone: nothing left to tell
    abort_all({})


def test_an_unhandled_sigterm_is_not_lost() -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    try:
        with listen() as request:
            os.kill(os.getpid(), signal.SIGTERM)
            assert request.stop
            assert got == []
        assert got == [signal.SIGTERM]
        with suppress(StoppedError), listen():
            os.kill(os.getpid(), signal.SIGTERM)
            raise StoppedError
        assert got == [signal.SIGTERM], "this one was handled"
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("Out of memory: Killed process 654 (python) total-vm:9kB", " by the kernel, for lack of memory"),
        ("Memory cgroup out of memory: Killed process 654 (python)", " by the kernel, for lack of memory"),
        ("Out of memory: Killed process 6543 (python) total-vm:9kB", ""),
        ("", ", perhaps for lack of memory"),
    ],
    ids=["node", "slice", "another", "no permission"],
)  # fmt: skip
def test_the_kernel_says_whether_a_process_was_killed_for_lack_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: str, said: str
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "journalctl").write_text(f"#!/bin/sh\n[ \"$2\" = --dmesg ] && echo '{log}'\n")
    (tmp_path / "journalctl").chmod(0o755)

    assert explain_kill(9, 654) == said
    assert explain_kill(9, None) == ", perhaps for lack of memory"
    assert explain_kill(6, 654) == ""
    assert explain_kill(9, 654, ("sh", "-c", "exit 255")) == ", perhaps for lack of memory"
