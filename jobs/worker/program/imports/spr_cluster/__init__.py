"""The name under which a user's script imports the worker code: ``from spr_cluster import speed_up``.

On nodes, :mod:`worker.program` puts the folder above into ``PYTHONPATH``; nothing else in it could hide the
user's modules. Where spr-cluster is installed, this package is beside ``jobs``.
"""

from importlib import import_module
from pathlib import Path

_worker = Path(__file__).resolve().parents[3]
_is_here = (_worker / "fast").is_dir()
__path__ = [str(_worker)] if _is_here else [*import_module("jobs.worker").__path__]

speed_up = import_module(f"{__name__}.fast.speed_up").speed_up
