"""One rank's life, whatever its work is: every failure becomes an ``error`` event and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

from .errors import SquadError, StoppedError, first_line
from .events import Events
from .ranks import abort_all, lost_peer, read_identity
from .stopping import EXIT_CODE


def run_rank(work: Callable[[Events], None]) -> int:
    """Do the work as this rank; returns its exit code: 1 after a failure, 143 where it was told to
    end and did so in good order."""
    # Progress bars would tear the event lines apart in the merged output of all ranks.
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    events = Events()
    try:
        events = Events(read_identity(os.environ).rank)
        work(events)
    except StoppedError as stopped:
        events.note(str(stopped))
        return EXIT_CODE
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


def leave(code: int) -> None:
    """End the process; after a failure with all other ranks, and at once."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        if code != EXIT_CODE:  # by which all ranks end, each by itself
            abort_all()
        # At once: on the way out, torch's threads may wait for ranks that are gone.
        os._exit(code)
