"""`make aws-check`: what does the embedded cloud answer, and what does AWS answer? See docs/aws-check.md."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

# moto reads this when it is imported.
os.environ.setdefault("MOTO_AMIS_PATH", str(Path(__file__).parents[1] / "ubuntu_amis.json"))

from botocore.exceptions import BotoCoreError, ClientError

from cluster.console.output import allow_questions, confirm
from infra.aws.clients import translate_boto_error
from infra.errors import SprError, UsageError
from tests.aws_check.check import (
    Recording,
    check_facts,
    compare_commands,
    compare_probes,
    compare_structures,
    run_commands,
    run_probes,
)
from tests.aws_check.probes import DRY_RUNS, READS, on_a_cluster
from tests.aws_check.report import Report, Row
from tests.aws_check.sides import INTERRUPTED, Opener, Side, open_aws, open_embedded
from tests.aws_check.spend import MACHINES, TTL_MIN, Life, usd_to_spend

_COMMANDS = (
    "up --dry-run --name aws-check --nodes 2 --json",
    "up --dry-run --name aws-check --market spot --json",
    "list --json",
)
_PROBES = (*READS, *DRY_RUNS)
SAME, DIFFERENT, CANNOT_RUN = 0, 1, 2


def main(argv: Sequence[str] | None = None, target: Opener = open_aws) -> int:
    """Run the check; ``target`` opens another cloud as AWS, for tests."""
    args = _parse(argv)
    report = Report(args.region or "", _versions())
    try:
        _prepare(args, target)
        _check(args, target, report)
        report.complete = True
        code = DIFFERENT if report.differs else SAME
    except KeyboardInterrupt:
        print("Interrupted: the report is not complete.", file=sys.stderr)
        code = INTERRUPTED
    except (SprError, ClientError, BotoCoreError) as error:
        failure = translate_boto_error(error)
        print(f"aws-check: {failure or error}", file=sys.stderr)
        code = CANNOT_RUN
    if report.rows:
        print(report.render(all_rows=args.all))
        report.write(args.output)
        print(f"{args.output} has all of it, without ids, addresses, or account numbers.")
    return code


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    about = (
        "Compare the embedded cloud with AWS. By default it only reads and makes dry runs: no cost, nothing "
        "is changed."
    )
    parser = argparse.ArgumentParser(prog="make aws-check ARGS='...'", description=about)
    spend = (
        f"also buy {MACHINES}, train, replace one, and remove all: at most ${usd_to_spend():.2f}, after a "
        "question"
    )
    parser.add_argument("--region", help="the AWS region to compare with; it has no default")
    parser.add_argument("--spend", action="store_true", help=spend)
    parser.add_argument("--yes", action="store_true", help="spend without asking")
    parser.add_argument("--all", action="store_true", help="also print what is the same")
    file = Path("aws-check.json")
    parser.add_argument("--output", type=Path, default=file, help="the report's file")
    return parser.parse_args(argv)


def _prepare(args: argparse.Namespace, target: Opener) -> None:
    """Refuse what must not run, before anything is asked."""
    if not args.region:
        raise UsageError(
            "--region is missing", hint="for example: make aws-check ARGS='--region us-east-1'"
        )
    given = sorted(name for name in os.environ if name.startswith("AWS_ENDPOINT_URL"))
    if given and target is open_aws:
        raise UsageError(f"{', '.join(given)} is set: that is not AWS", hint="unset it")
    if args.spend:
        allow_questions()
        confirm(
            f"{MACHINES} in {args.region} for at most {TTL_MIN} minutes, one of them replaced: at most "
            f"${usd_to_spend():.2f} at the prices of us-east-1; some regions cost up to twice that. All of "
            "it is removed at the end. Continue?",
            yes=args.yes,
        )


def _check(args: argparse.Namespace, target: Opener, report: Report) -> None:
    life, ours, theirs = Life(), Recording(), Recording()
    with target(args.region) as there:
        # Bad credentials end it here, in seconds.
        there.client("sts").get_caller_identity()
        doctor = there.command(*life.doctor.split())
        print(doctor.out, file=sys.stderr)
        if doctor.code and args.spend:
            raise SprError(doctor.message)
    print("1 of 2: the embedded cloud", file=sys.stderr)
    with open_embedded() as here:
        _record(here, ours, life if args.spend else None)
    print(f"2 of 2: AWS {args.region}", file=sys.stderr)
    with target(args.region) as there, ExitStack() as at_the_end:
        # Also after Ctrl-C, what was seen is compared.
        at_the_end.callback(lambda: report.rows.extend(_compare(ours, theirs, life)))
        _record(there, theirs, life if args.spend else None)
        report.rows.extend(check_facts(there))
        if args.spend:
            report.rows.append(life.left(there))


def _record(side: Side, recording: Recording, life: Life | None) -> None:
    run_probes(side, _PROBES, recording)
    for command in _COMMANDS:
        run_commands(side, [command], recording)
    if life:
        life.live(side, recording)


def _compare(ours: Recording, theirs: Recording, life: Life) -> list[Row]:
    probes = (*_PROBES, *on_a_cluster(life.name))
    return [
        *compare_probes((p for p in probes if p.name in theirs.answers), ours, theirs),
        *compare_commands(ours, theirs),
        *compare_structures(ours.structures, theirs.structures),
    ]


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("boto3", "botocore", "moto")}


if __name__ == "__main__":
    sys.exit(main())
