"""A snapshot as text for a terminal of any size. Pure.

From top to bottom: the cluster, its jobs, its nodes, the queue, and a legend. Each node has a row, and one
for each of its ranks if there is room. If there is not even room for all nodes, those with problems come
first, and the last row counts the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone

from rich.cells import set_cell_size
from rich.text import Text

from cluster.console.display import format_seconds
from infra.words import counted, spoken_duration
from jobs.top.node_table import list_rows, render_nodes
from jobs.top.snapshot import SLOWER, LiveJob, Snapshot
from jobs.top.text_lines import BAD, DIM, GOOD, HEAD, SLOW, WIDE, bar, clean_text, fit, join

_JOBS = 3


def render(snapshot: Snapshot, width: int, height: int | None = None, notice: str = "") -> Text:
    """Return the snapshot as lines of at most ``width`` cells; at most ``height`` lines, if given.

    ``notice`` says what is wrong with the view itself.
    """
    head = [_render_title(snapshot, width), *_render_jobs(snapshot.jobs, width)]
    mark = any(node.stragglers for node in snapshot.nodes)
    foot = [
        fit(Text(notice, BAD) if notice else _legend(mark, on_screen=height is not None), width)
    ]
    queue = _render_queue(snapshot, width)
    if height is None:
        body = render_nodes(snapshot.nodes, width, None)
    else:
        room = max(4, height - len(head) - len(foot) - 2)
        wanted = len(list_rows(snapshot.nodes)) + 1
        kept = max(1, room // 4, room - wanted)
        if len(queue) > kept:
            queue = _shorten_queue(queue, kept, snapshot.queued)
        body = render_nodes(snapshot.nodes, width, room - len(queue))
        spare = room - len(queue) - len(body)
        foot = [*[Text()] * spare, *foot]
    lines = [*head, Text(), *body, Text(), *queue, *foot]
    return Text("\n").join(lines[:height])


def _render_title(snapshot: Snapshot, width: int) -> Text:
    silent = sum(bool(node.error) for node in snapshot.nodes)
    parts = [
        Text(snapshot.cluster or "cluster", HEAD),
        Text(counted(len(snapshot.nodes), "node")),
        Text(f"{silent} without an answer", BAD) if silent else Text(),
        Text("" if snapshot.usd is None else f"${snapshot.usd:.2f} so far"),
        Text() if snapshot.ttl_left_s is None else _render_ttl(snapshot.ttl_left_s),
        Text(f"{datetime.fromtimestamp(snapshot.time, timezone.utc):%H:%M:%S} UTC", DIM),
    ]
    return join(parts, width)


def _render_ttl(seconds: float) -> Text:
    if seconds <= 0:
        return Text("time to live is over", BAD)
    return Text(f"{spoken_duration(seconds)} to live", SLOW if seconds < 900 else "")


def _render_jobs(jobs: Sequence[LiveJob], width: int) -> list[Text]:
    lines = [_render_job(job, width) for job in jobs]
    if len(lines) > _JOBS:
        rest = counted(len(lines) - _JOBS + 1, "more job")
        lines[_JOBS - 1 :] = [Text(f"… and {rest}", DIM)]
    return lines or [Text("no job is running", DIM)]


def _render_job(job: LiveJob, width: int) -> Text:
    parts = [Text(clean_text(job.job), "bold cyan")]
    if job.step is not None and job.total:
        parts.append(Text(f"step {job.step}/{job.total}"))
        if width >= WIDE:
            share = min(1.0, job.step / job.total)
            parts.append(Text.assemble((bar(share, 20), GOOD), f" {100 * share:.0f} %"))
    if job.phase not in ("", "train") or job.step is None:
        parts.append(Text(clean_text(job.phase) or "starting"))
    if job.samples_per_second is not None:
        parts.append(Text(f"{job.samples_per_second:.1f} samples/s"))
    if job.left_s is not None and job.phase in ("", "train"):
        parts.append(Text(f"{format_seconds(round(job.left_s))} left"))
    if job.loss is not None:
        parts.append(Text(f"loss {job.loss:.3f}"))
    return join(parts, width)


def _render_queue(snapshot: Snapshot, width: int) -> list[Text]:
    if snapshot.queue_error:
        return [fit(Text(f"QUEUE  not known: {clean_text(snapshot.queue_error)}", DIM), width)]
    if not snapshot.queue:
        return [Text("QUEUE  empty", DIM)]
    header = f"{'QUEUE':<8}{'NAME':<27}{'STATE':<12}{'TIME':>11}{'NODES':>7}  WHERE OR WHY"
    lines = [fit(Text(header, DIM), width)]
    for row in snapshot.queue:
        name, state = (
            set_cell_size(clean_text(row.name), 26),
            set_cell_size(clean_text(row.state), 11),
        )
        where = clean_text(row.where or f"({row.reason})")
        text = f"{row.id[:7]:<8}{name} {state} {row.passed[:11]:>11}{row.nodes:>7}  {where}"
        lines.append(fit(Text(text, "" if row.state == "RUNNING" else DIM), width))
    return lines


def _legend(mark: bool, *, on_screen: bool) -> Text:
    """Return the keys, and what the mark of slow ranks means if there is one."""
    longer = f"! computes {100 * (SLOWER - 1):.0f} % longer per step than its job's median"
    return Text("   ".join(["q quits"] * on_screen + [longer] * mark), DIM)


def _shorten_queue(lines: list[Text], room: int, queued: int) -> list[Text]:
    """Return the header, the first jobs, and how many are left out; with room for one line, only that."""
    if room < 3:
        return [Text(f"QUEUE  {counted(queued, 'job')}", DIM)]
    return [*lines[: room - 1], Text(f"… and {counted(queued - room + 2, 'more job')}", DIM)]
