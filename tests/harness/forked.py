"""Python processes as forks of one that has loaded torch and transformers: each starts within milliseconds.

:class:`Forked` is a ``subprocess.Popen`` for ``python -c …`` and ``python -m …``. It is not for tests of what
libraries read when they are loaded, such as the variables of OpenMP and of Hugging Face.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_LOADED = (
    "torch.distributed",
    "torch.utils.tensorboard",
    "transformers.models.auto.modeling_auto",
    "transformers.models.distilbert.modeling_distilbert",
)
_LONGEST_REQUEST, _LINE = 1 << 20, 20


class Forked(subprocess.Popen[str]):
    """A process of the server, with this process's ends of its pipes."""

    def _execute_child(self, argv: Sequence[str], *given: Any) -> None:
        (cwd, env), pipes, start_new_session = given[4:6], given[9:15], given[20]
        request = {
            "argv": list(argv)[1:],
            "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
            "session": start_new_session,
        }
        ends = enumerate((pipes[0], pipes[3], pipes[5]))
        of_child = [end if end >= 0 else number for number, end in ends]
        self._status, theirs = os.pipe()
        socket.send_fds(_server()[0], [json.dumps(request).encode()], [*of_child, theirs])
        os.close(theirs)
        self.pid = int(os.read(self._status, _LINE))
        own: Any = self
        own._child_created = True
        own._close_pipe_fds(*pipes)

    def _try_wait(self, flags: int) -> tuple[int, int]:
        if not select.select([self._status], [], [], 0 if flags & os.WNOHANG else None)[0]:
            return 0, 0
        status = int(os.read(self._status, _LINE) or signal.SIGKILL)
        os.close(self._status)
        return self.pid, status

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        own: Any = self
        if self.returncode is None and (ended := self._try_wait(os.WNOHANG))[0]:
            own._handle_exitstatus(ended[1])
        return self.returncode


def run_forked(
    argv: Sequence[str], *, timeout: float, input: str | None = None, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run ``python …`` to its end, as ``subprocess.run`` does, with its output as text."""
    ends: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with Forked(argv, text=True, **ends, **more) as process:
        try:
            out, err = process.communicate(input, timeout)
        finally:
            process.kill()
    return subprocess.CompletedProcess(argv, process.returncode, out, err)


@functools.cache
def _server() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start the process that forks; it ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LONGEST_REQUEST)
    with theirs:
        theirs.set_inheritable(True)
        argv = [sys.executable, "-m", "tests.harness.forked", str(theirs.fileno())]
        return ours, subprocess.Popen(argv, cwd=_ROOT, pass_fds=[theirs.fileno()])


def _serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork for each request; return the request in the child, and nothing once the tests have ended."""
    wake, waker = os.pipe()
    for end in (wake, waker):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker)
    children: dict[int, int] = {}
    while True:
        ready: list[Any] = select.select([control.fileno(), wake], [], [])[0]
        if wake in ready:
            os.read(wake, 1000)
            _tell_ended(children)
        if control.fileno() in ready:
            data, fds, *_ = socket.recv_fds(control, _LONGEST_REQUEST, 4)
            if not data:
                return None
            request: dict[str, Any] = json.loads(data)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for number, fd in enumerate(fds[:3]):
                    os.dup2(fd, number)
                os.closerange(3, max(*fds, wake, waker, control.fileno()) + 1)
                return request
            for fd in fds[:3]:
                os.close(fd)
            children[pid] = fds[3]
            os.write(fds[3], _line(pid))


def _line(number: int) -> bytes:
    """One message of the pipe; the next one may follow before it is read."""
    return str(number).ljust(_LINE).encode()


def _tell_ended(children: dict[int, int]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        os.write(children[pid], _line(status))
        os.close(children.pop(pid))


def _become(request: dict[str, Any]) -> None:
    """Be the process that was requested."""
    if request["session"]:
        os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    kind, program, *words = request["argv"]
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    inherited = [path for path in sys.path if path not in ("", str(_ROOT))]
    sys.path[:] = ["" if kind == "-c" else request["cwd"], *paths, *inherited]
    importlib.invalidate_caches()
    sys.argv[:] = [kind, *words]
    if kind == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), vars(main))


def _run(request: dict[str, Any]) -> int:
    """Return the exit code."""
    try:
        _become(request)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _end(code: int) -> None:
    """End as the interpreter does, without the seconds in which it takes everything apart."""
    own: Any = threading
    own._shutdown()
    own = atexit
    own._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    for _name in _LOADED:
        importlib.import_module(_name)
    gc.collect()
    gc.freeze()  # or each fork would copy all of this
    if _request := _serve(socket.socket(fileno=int(sys.argv[1]))):
        _end(_run(_request))
