"""Python processes as forks of one that has loaded torch and transformers: each starts within milliseconds.

They are not for tests of what libraries read when they are loaded, such as the variables of OpenMP and of
Hugging Face.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import runpy
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

_ROOT = str(Path(__file__).parents[2])
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "pytest",
        "torch.distributed",
        "torch.utils.tensorboard",
        "transformers.models.auto.modeling_auto",
        "transformers.models.distilbert.modeling_distilbert",
        "transformers.trainer",
    ]
)


class Forked:
    """A process that runs Python with ``-c …`` or ``-m …``; ``stdout`` has all that it prints."""

    def __init__(
        self,
        words: Sequence[str],
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: Path = Path(os.devnull),
    ) -> None:
        ours, theirs = _CONTEXT.Pipe(duplex=False)
        place = str(cwd or Path.cwd())
        environ = dict(os.environ if env is None else env)
        self._process = _CONTEXT.Process(
            target=_become, args=(theirs, words, place, environ, str(stdin)), daemon=True
        )
        with ours, theirs:
            self._process.start()
            self.stdout = os.fdopen(os.dup(ours.fileno()), encoding="utf-8", errors="replace")

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self._process.is_alive() and self._process.pid:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait(timeout=0)
        self.stdout.close()

    def wait(self, timeout: float) -> int:
        """Return the exit code; at the timeout, kill it."""
        self._process.join(timeout)
        self.kill()
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def finish(self, timeout: float) -> tuple[int, str]:
        """Return the exit code, and the rest of what is printed."""
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.extend(self.stdout), daemon=True)
        reader.start()
        reader.join(timeout)
        code = self.wait(0 if reader.is_alive() else timeout)
        reader.join(timeout=1)
        self.stdout.close()
        return code, "".join(lines)


def _become(
    out: Connection, words: Sequence[str], cwd: str, environ: dict[str, str], stdin: str
) -> None:
    """Be the process that was requested."""
    gc.freeze()  # or a collection would copy all that was loaded
    os.dup2(out.fileno(), 1)
    os.dup2(out.fileno(), 2)
    out.close()
    sys.stdin = Path(stdin).open(encoding="utf-8")  # noqa: SIM115
    os.dup2(sys.stdin.fileno(), 0)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    kind, program, *argv = words
    paths = filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))
    inherited = [path for path in sys.path if path not in ("", _ROOT)]
    sys.path[:] = ["" if kind == "-c" else cwd, *paths, *inherited]
    importlib.invalidate_caches()
    sys.argv[:] = [kind, *argv]
    if kind == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), vars(main))
