"""``python -m squad``: one rank of a training run. Exit code 1 is a failure, 2 bad arguments."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from .distributed import abort_all, lost_peer, read_identity
from .errors import SquadError, first_line
from .events import Events
from .job import run
from .options import parse_argv


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job as this rank; every failure ends as an ``error`` event and exit code 1."""
    options = parse_argv(argv)
    # Progress bars would tear the event lines apart in the merged output of all ranks.
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    events = Events()
    try:
        events = Events(read_identity(os.environ).rank)
        run(options, events)
    except SquadError as error:
        events.error(error.message, error.hint)
    except Exception as error:
        _report(error, events)
    else:
        return 0
    return 1


def _report(error: Exception, events: Events) -> None:
    if lost_peer(error):
        hint = "the rank that failed first says why; if none does, its machine went away"
        events.error(f"lost contact with another rank: {first_line(error)}", hint, lost_peer=True)
        return
    traceback.print_exc()
    hint = "this is a bug of the job or of a library: see the traceback in the log"
    events.error(f"{type(error).__name__}: {first_line(error)}", hint)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        abort_all()
        # At once: on the way out, torch's threads may wait for ranks that are gone.
        os._exit(code)
