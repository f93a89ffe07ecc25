"""The user's own SSH configuration: one line in it lets ssh, rsync, scp, and editors know all nodes.

It includes a file that includes what each cluster keeps (:attr:`ClusterFiles.ssh_hosts`), so it never
changes. Without the user's request, nothing outside this tool's folder is touched.
"""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path

from cluster.local_files import home
from infra.files import write_private

COMMAND = "spr-cluster ssh --setup"


def _config() -> Path:
    return Path.home() / ".ssh" / "config"


def _line() -> str:
    return f'Include "{home().absolute()}/ssh_config"'


def add_include() -> bool:
    """Put the line first in ``~/.ssh/config``; return whether it was missing."""
    write_private(home() / "ssh_config", f'Include "{home().absolute()}/*/ssh_hosts"\n')
    text = _read()
    if _line() in text.splitlines():
        return False
    # At the top: below a Host line, it would apply to that host only.
    _write(f"{_line()}\n{text}")
    return True


def remove_include() -> bool:
    """Remove the line; return whether it was there."""
    lines = _read().splitlines(keepends=True)
    kept = [line for line in lines if line.strip() != _line()]
    if len(kept) < len(lines):
        _write("".join(kept))
    (home() / "ssh_config").unlink(missing_ok=True)
    return len(kept) < len(lines)


def offer_once() -> str:
    """Return a line that offers the setup, the first time; "" afterward, or if it is done."""
    marker = home() / ".ssh-setup-offered"
    with suppress(OSError, ValueError):
        if not marker.exists() and _line() not in _read().splitlines():
            marker.touch(mode=0o600)
            return (
                f"To reach nodes with plain ssh, rsync, scp, or an editor, as NAME-node0: {COMMAND}"
            )
    return ""


def _read() -> str:
    path = _config()
    return path.read_bytes().decode("utf-8", "surrogateescape") if path.exists() else ""


def _write(text: str) -> None:
    """Replace the file atomically; a link to it stays a link, and its mode stays."""
    path = _config().resolve()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".config-", delete=False) as file:
        fresh = Path(file.name)
        try:
            file.write(text.encode("utf-8", "surrogateescape"))
            file.flush()
            fresh.chmod(mode)
            fresh.replace(path)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise
