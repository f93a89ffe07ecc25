"""Follow a pod's log across broken connections, without losing or repeating lines."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable
from datetime import datetime, timedelta
from http import HTTPStatus
from typing import TYPE_CHECKING

from infra.words import counted
from jobs.launchers.kubernetes.errors import KubernetesError, NotFoundError
from jobs.launchers.kubernetes.resources import (
    PodView,
    as_int,
    core_path,
    dig,
    parse_pod,
    parse_time,
)

if TYPE_CHECKING:
    from jobs.launchers.kubernetes.api import KubernetesApi

# kubelet puts one before each line; its zone is the node's.
_STAMP = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d+)?(Z|[+-]\d\d:\d\d) ")
_OVERLAP = timedelta(seconds=1)
_TRIES = 8
_PAUSE_S = 8.0
_FINAL = (HTTPStatus.FORBIDDEN, HTTPStatus.UNAUTHORIZED)
_LASTS_S = 10.0
"""A connection that lasted this long did not fail: load balancers close silent ones."""


def read_log(
    api: KubernetesApi,
    pod: PodView,
    on_line: Callable[[str], None],
    note: Callable[[str], None],
) -> None:
    """Stream a pod's log so far; if its container restarted, the previous run's first.

    ``note`` receives one line about that. kubelet keeps no older runs.
    """
    status = next((each for each in pod.statuses if each.get("name") == pod.container), {})
    so_far = f"pod {pod.name} has restarted {counted(as_int(status.get('restartCount')), 'time')}"
    if dig(status, "state", "waiting") and dig(status, "lastState", "terminated"):
        # kubelet then returns the same log as current and as previous.
        note(f"{so_far} and waits to start again: the log of its last run")
    elif dig(status, "lastState", "terminated"):
        note(f"{so_far}: the log of its run before, then of this one")
        try:
            PodLog(api, pod, on_line).read(previous=True)
        except KubernetesError as error:
            if error.status != HTTPStatus.BAD_REQUEST:  # it is no longer kept
                raise
    PodLog(api, pod, on_line).read()


class PodLog:
    """Reads the log of one pod and passes on each line once.

    ``sinceTime`` has a resolution of one second, and timestamps of stdout and stderr may be out of order.
    So a resumed stream starts a second before the newest line and skips the lines seen before.
    """

    def __init__(self, api: KubernetesApi, pod: PodView, on_line: Callable[[str], None]) -> None:
        self._api, self._pod, self._on_line = api, pod, on_line
        self._path = core_path(api.namespace, "pods", pod.name)
        self._recent: deque[tuple[datetime, bytes]] = deque()
        self._newest: datetime | None = None
        self.count = 0

    def read(self, *, follow: bool = False, previous: bool = False) -> None:
        """Pass on new lines; with ``follow``, until the stream ends or breaks.

        ``previous`` reads the log of the container's run before the current one.
        """
        since = (self._newest - _OVERLAP).isoformat() if self._newest else ""
        query = {
            "timestamps": "true",
            "container": self._pod.container,
            "follow": "true" if follow else "",
            "previous": "true" if previous else "",
            "sinceTime": since,
        }
        query = {name: value for name, value in query.items() if value}
        repeated = Counter(line for _, line in self._recent)
        for line in self._api.lines(f"{self._path}/log", query, keep_rest=not follow):
            if repeated[line]:
                repeated[line] -= 1
            else:
                self._pass_on(line)

    def follow(self) -> None:
        """Pass on lines until the pod has ended or is gone. Raises :class:`KubernetesError`.

        A log may end before its pod does, because a container can restart in the same pod.
        """
        failures, clock = 0, self._api.clock
        while True:
            began, count = clock.monotonic(), self.count
            try:
                # Checked before reading: a log read after the pod's end is complete.
                over = self._is_over()
                self.read(follow=not over)
                if over:
                    return
                failures = 0
            except NotFoundError:
                return
            except KubernetesError as error:
                lasted = clock.monotonic() - began >= _LASTS_S
                failures = 1 if lasted or self.count > count else failures + 1
                if failures > _TRIES or error.status in _FINAL:
                    raise
            clock.sleep(min(_PAUSE_S, 0.5 * 2**failures))

    def _is_over(self) -> bool:
        pod = parse_pod(self._api.get(self._path))
        # Another pod may have its name now.
        return pod.uid != self._pod.uid or pod.is_over

    def _pass_on(self, line: bytes) -> None:
        stamp = _STAMP.match(line)
        text = line[stamp.end() :] if stamp else line
        if stamp and (time := parse_time(b"".join(stamp.groups()).decode())):
            self._remember(time, line)
        self.count += 1
        self._on_line(text.decode(errors="replace").rstrip("\r"))

    def _remember(self, time: datetime, line: bytes) -> None:
        self._recent.append((time, line))
        if self._newest is None or time > self._newest:
            self._newest = time
            while self._recent[0][0] < time - _OVERLAP:
                self._recent.popleft()
