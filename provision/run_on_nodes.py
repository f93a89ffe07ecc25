"""Python modules that a node's own Python runs: they travel over standard input, and nothing is installed.

They use the standard library and each other alone, and Python 3.8 or newer.
"""

from __future__ import annotations

import inspect
import json
import shlex
from collections.abc import Sequence
from types import ModuleType

_START = """import json,sys,types
for name,text in json.loads(sys.stdin.readline()):
 module=sys.modules[name]=types.ModuleType(name);module.__package__=name.rpartition(".")[0]
 exec(compile(text,name,"exec"),module.__dict__)
module.main()"""
# The system's Python, without what a user's environment adds to it: it starts in 10 ms.
PYTHON = ("python3", "-I", "-S", "-c", _START)
"""The words of the command that runs the modules of the first line of its standard input."""
_END = "_END_OF_THE_PROGRAM_"


def bundle(modules: Sequence[ModuleType]) -> str:
    """Return the line: each module after those that it imports, and last the one whose ``main`` runs."""
    return json.dumps([(module.__name__, inspect.getsource(module)) for module in modules])


def render_program(
    title: str, modules: Sequence[ModuleType], *arguments: str, node: str = ""
) -> str:
    """Return the shell command by which the head runs the modules, or has another ``node`` run them."""
    run = shlex.join([*PYTHON, *arguments])
    there = f"ssh {node} {shlex.quote(run)}" if node else run
    return f"# {title}\n{there} <<'{_END}'\n{bundle(modules)}\n{_END}"
