"""The user's own SSH configuration: one line in it lets ssh, rsync, scp, and editors know all nodes.

It includes a file that includes what each cluster keeps (:attr:`ClusterFiles.ssh_hosts`), so it never
changes. Without the user's request, nothing outside this tool's folder is touched.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from cluster.local_files import home
from infra.files import open_private, write_private

COMMAND = "spr-cluster ssh --setup"
_MARK = f"# {COMMAND}"


def _config() -> Path:
    return Path.home() / ".ssh" / "config"


def _line() -> str:
    return f'Include "{home()}/ssh_config"'


def _remove(text: str) -> tuple[str, list[str]]:
    """Remove the line with its comment, also for a folder that has moved since; return what was removed."""
    removed = list[str]()

    def cut(found: re.Match[str]) -> str:
        # Another SPR_CLUSTER_HOME has its own line.
        if found["other"] and Path(found["other"]).exists():
            return found[0]
        removed.append(found[0])
        return ""

    kept = re.sub(
        rf"^(?:{_MARK}\r?\n)?{re.escape(_line())}[ \t\r]*(?:\n|\Z)"
        rf'|^{_MARK}\r?\nInclude "(?P<other>.*/ssh_config)"\r?(?:\n|\Z)',
        cut,
        text,
        flags=re.MULTILINE,
    )
    return kept, removed


def add_include() -> bool:
    """Put the line first in ``~/.ssh/config``; return whether it was missing."""
    write_private(home() / "ssh_config", f'Include "{home()}/*/ssh_hosts"\n')
    kept, found = _remove(_read())
    if len(found) == 1 and _line() in found[0]:
        return False
    # At the top: below a Host line, it would apply to that host only.
    _write(f"{_MARK}\n{_line()}\n{kept}")
    return True


def remove_include() -> bool:
    """Remove the line; return whether it was there."""
    kept, found = _remove(_read())
    if found:
        _write(kept)
    (home() / "ssh_config").unlink(missing_ok=True)
    return bool(found)


def reached() -> list[str]:
    """Return the clusters whose nodes this machine knows."""
    return sorted(path.parent.name for path in home().glob("*/ssh_hosts"))


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
    """Replace the file atomically; a link to it stays a link."""
    path = _config().resolve()
    # Writing it directly would replace the user's `config.new`.
    fresh = path.with_name(".config-spr-cluster")
    with open_private(fresh) as file:
        file.write(text.encode("utf-8", "surrogateescape"))
    fresh.replace(path)
