"""What an array runs, as one value for the laptop and the ranks, and where an element's files are.

In the job's folder on a node, for element 3:

elements/3/           output/, log, and, once it has ended, end.json: also on a second node
output/elements/3/    its output, on the node of rank 0
output.state/logs/element-3.log  likewise
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

ARRAY = "data/array.json"
"""In a job's folder on every node: its :class:`ArrayPlan`."""
INDEX = "SPR_ARRAY_INDEX"
ELEMENTS = Path("elements")
OUTPUT, LOG, END = "output", "log", "end.json"


@dataclass(frozen=True)
class ArrayPlan:
    """A program, and its elements' variables by their indexes, of which ``limit`` run at a time; 0 for all.

    ``asked`` is the option's value, such as ``1-100%8`` or ``runs.csv:3,17``. ``file`` is the CSV file
    that it names, "" without one.
    """

    program: tuple[str, ...]
    elements: Mapping[int, Mapping[str, str]]
    limit: int = 0
    asked: str = ""
    file: str = ""

    def render(self) -> bytes:
        """Return the plan as JSON."""
        return json.dumps(asdict(self)).encode()


def parse_array(text: str) -> ArrayPlan:
    """Parse the result of :meth:`ArrayPlan.render`."""
    known = json.loads(text)
    elements = {int(index): each for index, each in known["elements"].items()}
    return ArrayPlan(**{**known, "program": tuple(known["program"]), "elements": elements})
