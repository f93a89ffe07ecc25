"""Files of what is asked and, indented below it, what is answered.

To add a case, write what is asked and run the test with UPDATE_GOLDEN=1.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path

from tests.golden import check_golden
from tests.harness.command_line import CommandLine, files_at_home

_INDENT = "    "


def check_transcript(path: Path, answer: Callable[[str], str]) -> None:
    """Compare the answer to each block of a file with its indented lines; headings begin with ``#``."""
    blocks = []
    for block in path.read_text().rstrip("\n").split("\n\n"):
        rows = block.splitlines()
        asked = "\n".join(row for row in rows if not row.startswith(_INDENT))
        said = "" if asked.startswith("# ") else answer(asked)
        # Some versions of Python put quotes around choices.
        said = re.sub(r"invalid choice: .*\)", lambda found: found[0].replace("'", ""), said)
        said = said.replace(str(Path.cwd()), "HERE")
        blocks.append("\n".join(filter(None, (asked, textwrap.indent(said, _INDENT)))))
    check_golden(path, "\n\n".join(blocks) + "\n")


def refuse(line: CommandLine, *argv: str) -> str:
    """The one message of a mistake, which changes nothing in EC2 and on this machine."""
    before = line.changes

    result = line.run(*argv)

    assert (result.code, result.out) == (2, ""), (argv, result)
    assert result.err.count("spr-cluster: ") == 1, result.err
    assert line.changes == before, argv
    assert files_at_home(event_logs=True) == [], argv
    return result.message
