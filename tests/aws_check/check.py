"""The checks: each runs on the embedded cloud first, and then on AWS with the same parameters."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from botocore.exceptions import BotoCoreError, ClientError

from infra.aws.clients import DENIED, error_code, translate_boto_error
from infra.errors import UsageError
from tests.aws_check.facts import FACTS, Fact
from tests.aws_check.probes import Probe
from tests.aws_check.report import Row, Verdict
from tests.aws_check.sides import Answer, MissingError, Side, ask
from tests.aws_check.structures import Structures, compare, is_read, new_values
from tests.harness.contract import watching

_LONGEST_LIST = 12
# An answer like others, unless nothing else is answered either.
_MAY_BE_EXPIRED = re.compile("AuthFailure|Expired|Signature|Token")


@dataclass
class Recording:
    """What one side has answered: by probe, by command, and the structure of all answers."""

    answers: dict[str, Answer | str] = field(default_factory=dict)
    """By the probe's name; a text says why there is none."""
    commands: dict[str, str] = field(default_factory=dict)
    """By the command: its failure, or empty."""
    structures: Structures = field(default_factory=Structures)


def run_probes(side: Side, probes: Iterable[Probe], recording: Recording) -> None:
    with watching(recording.structures):
        for probe in probes:
            recording.answers[probe.name] = _run(side, probe)


def _run(side: Side, probe: Probe) -> Answer | str:
    try:
        answer = ask(side, probe.service, probe.operation, probe.parameters(side))
        if _MAY_BE_EXPIRED.search(answer.code):
            side.client("sts").get_caller_identity()
        return answer
    except MissingError as error:
        return str(error)
    except (ClientError, BotoCoreError) as error:  # also of a look that prepares the call
        return _explain(error)


def _explain(error: Exception) -> str:
    """Return an error in one line. Raises :class:`UsageError` for unusable credentials."""
    found = translate_boto_error(error)
    if isinstance(found, UsageError):
        raise found from None
    return found.message if found else str(error)


def run_commands(side: Side, commands: Iterable[str], recording: Recording) -> bool:
    """Run commands of the product up to the first failure; return whether all succeeded."""
    with watching(recording.structures):
        for command in commands:
            result = side.command(*shlex.split(command))
            recording.commands[command] = result.message if result.code else ""
            if result.code:
                return False
    return True


def compare_probes(probes: Iterable[Probe], ours: Recording, theirs: Recording) -> Iterator[Row]:
    for probe in probes:
        here, there = (side.answers.get(probe.name, "not run") for side in (ours, theirs))
        names = (probe.name, probe.why)
        if isinstance(here, str) or isinstance(there, str):
            reasons = [text for text in (here, there) if isinstance(text, str)]
            yield Row(*names, "skipped", details=tuple(reasons))
        elif there.code in DENIED:
            denied = f"not allowed: {probe.service} {probe.operation}"
            yield Row(*names, "skipped", details=(denied,))
        else:
            same = (here.code, here.status) == (there.code, there.status)
            details = () if same else (f"AWS says: {there.message}",)
            yield Row(*names, "same" if same else "differs", str(here), str(there), details)


def compare_commands(ours: Recording, theirs: Recording) -> Iterator[Row]:
    for command, failure in theirs.commands.items():
        # What only one side runs has nothing to be compared with.
        here = ours.commands.get(command, "")
        texts = {"embedded": here, "AWS": failure}
        details = tuple(f"{side}: {text}" for side, text in texts.items() if text)
        verdict: Verdict = "differs" if details else "same"
        yield Row(f"spr-cluster {command}", "the product itself", verdict, details=details)


def compare_structures(ours: Structures, theirs: Structures) -> Iterator[Row]:
    """What only one side shows matters if the product reads it."""
    for operation in sorted(ours.seen.keys() & theirs.seen.keys()):
        only_here, only_there = compare(ours.seen[operation], theirs.seen[operation])
        matters = [
            *(f"AWS does not show {path}" for path in only_here if is_read(path)),
            *(f"the embedded cloud does not show {path}" for path in only_there if is_read(path)),
        ]
        rest = [
            *(f"only embedded: {path}" for path in only_here if not is_read(path)),
            *(f"new values: {path}: {', '.join(values)}" for path, values in
              new_values(ours.seen[operation], theirs.seen[operation]).items()),
            *(f"not in botocore's model: {text}" for text in sorted(theirs.unmodeled.get(operation, ()))),
            *([f"only AWS: {len(unread)} elements that the product does not read: {_some(unread)}"]
              if (unread := [path for path in only_there if not is_read(path)]) else []),
        ]  # fmt: skip
        verdict: Verdict = "differs" if matters else "note" if rest else "same"
        why = "the product reads these elements" if matters else "elements of the answer"
        yield Row(f"answer of {operation}", why, verdict, details=(*matters, *rest))


def _some(items: Sequence[str]) -> str:
    more = len(items) - _LONGEST_LIST
    return ", ".join(items[:_LONGEST_LIST]) + (f", and {more} more" if more > 0 else "")


def check_facts(side: Side, facts: Iterable[Fact] = FACTS) -> Iterator[Row]:
    for fact in facts:
        try:
            found = tuple(fact.look(side))
        except ClientError as error:
            what = "not allowed" if error_code(error) in DENIED else error_code(error)
            details = (f"{what}: {error.operation_name}",)
            yield Row(fact.name, fact.why, "skipped", details=details)
            continue
        except BotoCoreError as error:
            yield Row(fact.name, fact.why, "skipped", details=(_explain(error),))
            continue
        except (LookupError, ValueError) as error:
            found = (f"AWS answers in another form: {error!r}",)
        yield Row(fact.name, fact.why, "differs" if found else "same", details=found)
