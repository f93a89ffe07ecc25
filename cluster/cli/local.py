"""``spr-cluster local``: the embedded cloud of this machine."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from cluster.cli.parser import SubParsers, add_command
from cluster.local_files import ClusterFiles, cluster_names
from infra.local import LocalStatus

_EXAMPLES = """\
  spr-cluster local status
  spr-cluster local stop                  # until the next command with --cloud local
  spr-cluster local reset --keep-base     # remove everything but the base image
  spr-cluster local faults bad-day.toml   # slow machines, full zones, lost answers
"""
_FAULTS_EXAMPLES = """\
  spr-cluster local faults                # what is in force
  spr-cluster local faults bad-day.toml   # put a file in force, also while a command runs
  spr-cluster local faults --clear        # a perfect cloud again

a file (every part is optional; docs/embedded-cloud.md has all of them):
  profile = "metal"                       # boot 20 s, image 60 s, end 5 s; or instant, fast
  visibility_s = 2                        # what is new is not known everywhere at once
  [[capacity]]                            # a full zone
  zone = "us-east-1a"
  free = 0
  [[error]]                               # the next launch acts, and its answer is lost
  action = "RunInstances"
  effect = true
  [[machine]]                             # the third machine from now on never boots
  n = 2
  fate = "never-boots"
"""


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "local",
        "Manage the embedded cloud: EC2's API on this machine, with containers as instances. "
        "Any command with `--cloud local` starts it.",
        _EXAMPLES,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    status = add_command(
        actions,
        "status",
        "Show the server, and what the embedded cloud has: networks, instances, images.",
        "  spr-cluster local status --json\n",
        help_="show what there is of it",
    )
    status.add_argument("--json", action="store_true", help="print it as JSON on stdout")
    status.set_defaults(run=run_status)
    stop = add_command(
        actions,
        "stop",
        "End the server and stop the instances. The next command that uses the embedded cloud "
        "takes it up again: what ran then runs again, with the same disks and addresses.",
        "  spr-cluster local stop\n",
        help_="end the server and stop the instances; the state is kept",
    )
    stop.add_argument("--json", action="store_true", help="print what is left as JSON on stdout")
    stop.set_defaults(run=run_stop)
    reset = add_command(
        actions,
        "reset",
        "Remove the embedded cloud with all its instances and images, running or not.",
        "  spr-cluster local reset\n",
        help_="remove it, whatever state it is in",
    )
    reset.add_argument(
        "--keep-base",
        action="store_true",
        help="keep the base image, which takes a minute or two to build",
    )
    reset.add_argument("--json", action="store_true", help="print what is left as JSON on stdout")
    reset.set_defaults(run=run_reset)
    _add_faults(actions)


def _add_faults(actions: SubParsers) -> None:
    faults = add_command(
        actions,
        "faults",
        "Show what the embedded cloud does slowly, badly or not at all, or put a file in force "
        "that says it. A wrong file is refused and changes nothing.",
        _FAULTS_EXAMPLES,
        help_="make it slow, full or unreliable, as AWS can be",
    )
    choice = faults.add_mutually_exclusive_group()
    choice.add_argument("file", nargs="?", metavar="FILE", help="put this TOML file in force")
    choice.add_argument("--clear", action="store_true", help="no faults from now on")
    faults.add_argument("--json", action="store_true", help="print what is in force as JSON")
    faults.set_defaults(run=run_faults)


def run_status(args: argparse.Namespace) -> int:
    from infra.local import status

    _print(status(), as_json=args.json)
    return 0


def run_stop(args: argparse.Namespace) -> int:
    from infra.local import status, stop

    stop()
    _print(status(), as_json=args.json)
    return 0


def run_reset(args: argparse.Namespace) -> int:
    from infra.local import reset, status

    reset(keep_base=args.keep_base)
    for name in cluster_names("local"):
        ClusterFiles.of(name).remove()
    _print(status(), as_json=args.json)
    return 0


def run_faults(args: argparse.Namespace) -> int:
    from infra.local import clear_faults, put_faults, show_faults

    if args.clear:
        clear_faults()
    elif args.file:
        put_faults(Path(args.file))
    shown = show_faults()
    if args.json:
        print(json.dumps(asdict(shown)))
    elif shown.file:
        print(f"# in force: {shown.file}\n{shown.text.rstrip()}")
    else:
        print("no faults: everything works, and at once")
    return 0


def _print(status: LocalStatus, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(status)))
        return
    found = status.resources
    server = f"running at {status.endpoint} (pid {status.pid})" if status.running else "not running"
    print(f"{'server':12} {server}")
    print(f"{'state':12} {status.folder}")
    if status.faults:
        print(f"{'faults':12} {status.faults}")
    for name, ranges in found.networks.items():
        print(f"{'network':12} {ranges} ({name})")
    for instance in found.instances:
        print(f"{'instance':12} {instance.id} {instance.state} ({instance.region})")
    for image in found.images:
        print(f"{'image':12} {image}")
    for image in found.base_images:
        print(f"{'base image':12} {image}")
    if not (found.networks or found.instances or found.images):
        print("It has no networks, instances or images.")
