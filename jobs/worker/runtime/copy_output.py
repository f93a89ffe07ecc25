"""``python copy_output.py LOG``: append standard input to LOG, and print it as whole lines.

mpirun merges the ranks' output as it comes, and a program may write a line in pieces, as Python's ``print``
does when it is unbuffered. A progress bar or a question, which has no end of line, is printed after
:data:`PAUSE_S` seconds without more.
"""

import os
import select
import sys
from contextlib import suppress

PAUSE_S = 1.0
_SIZE = 1 << 16


def main(log: str) -> None:
    """Copy until the end of standard input. An output that can't be written doesn't stop the other."""
    appended = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    rest = b""
    while True:
        if rest and (len(rest) >= _SIZE or not select.select([0], [], [], PAUSE_S)[0]):
            _write(1, rest)
            rest = b""
        text = os.read(0, _SIZE)
        _write(appended, text)
        rest += text
        end = max(rest.rfind(b"\n"), rest.rfind(b"\r")) + 1 if text else len(rest)
        _write(1, rest[:end])
        rest = rest[end:]
        if not text:
            return


def _write(file: int, text: bytes) -> None:
    with suppress(OSError):  # a full disk, or the reader has gone
        while text:
            text = text[os.write(file, text) :]


if __name__ == "__main__":
    main(sys.argv[1])
