"""The faults that the server acts by now: the file's last good state, and what it has counted."""

from __future__ import annotations

import logging
import random
from collections import Counter
from pathlib import Path

from infra.errors import UsageError
from infra.local.faults import ErrorRule, Faults, MachineRule, read_faults

Stamp = tuple[int, int, int]


class FaultsInForce:
    """Follows a faults file; one that is broken is logged, and the last good one stays in force."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: Stamp | None = None
        self.take(Faults(), None)

    def take(self, faults: Faults, policy: str | None) -> None:
        """Begin anew with these: every count starts at 0."""
        self.now = faults
        self.policy = policy
        self._random = random.Random(faults.seed)
        self._calls: Counter[int] = Counter()
        self._launched = 0

    def refresh(self) -> None:
        """Take up the file where it has changed; one that is gone means no faults."""
        stamp = _stamp_of(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        if stamp is None:
            self.take(Faults(), None)
            return
        try:
            self.take(*read_faults(self._path))
        except UsageError as error:
            logging.error("faults stay as they were: %s", error.message)

    def is_throttled(self, action: str) -> bool:
        """Whether this call is one too many; every rule that matches draws its own lot."""
        rates = [rule.rate for rule in self.now.throttle if rule.action in ("*", action)]
        lots = [self._random.random() < rate for rate in rates]
        return any(lots)

    def find_error(self, action: str) -> ErrorRule | None:
        """The rule by which this call fails. A call that one rule fails is no call for the next."""
        for number, rule in enumerate(self.now.error):
            if rule.action not in ("*", action):
                continue
            count = self._calls[number]
            self._calls[number] += 1
            if rule.after <= count < rule.after + rule.times:
                return rule
        return None

    def next_fate(self) -> MachineRule | None:
        """What becomes of the machine that is just being launched."""
        number, self._launched = self._launched, self._launched + 1
        return next((rule for rule in self.now.machine if rule.n in (number, "*")), None)


def _stamp_of(path: Path) -> Stamp | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
