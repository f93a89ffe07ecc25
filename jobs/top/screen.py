"""A snapshot as text for a terminal of any size: the table of nodes and ranks, bars, and styles. Pure.

From top to bottom: the cluster, its jobs, its nodes, the queue, and a legend. Each node has a row
and, if there is room, one for each of its ranks. Without room for all nodes, those with problems come first,
and the last row counts the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import zip_longest

from rich.cells import set_cell_size
from rich.text import Text

from cluster.console.display import format_seconds
from infra.words import counted, spoken_duration
from jobs.top.snapshot import SLOWER, CoreGroup, LiveJob, LiveNode, LiveRank, Snapshot, combine
from jobs.worker.tasks import TASKS, format_score

GOOD, SLOW, BAD, DIM, HEAD = "green", "yellow", "bold red", "dim", "bold"
WIDE = 120
_SCORES = {name: title for task in TASKS.values() for name, title in task.scores.items()}
_EIGHTHS = " ▏▎▍▌▋▊▉"


def bar(share: float, width: int) -> str:
    """Return a bar, full to an eighth of a cell, for a share from 0 to 1."""
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    full, part = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[part] if part else "")).ljust(width)


def format_rate(rate: float) -> str:
    """Return a number of bytes in at most five characters: ``980``, ``1.2k``, ``34M``, ``5.6G``."""
    for unit in ("", "k", "M", "G"):
        if rate < 999.5 or unit == "G":
            return f"{rate:.1f}{unit}" if unit and rate < 9.95 else f"{rate:.0f}{unit}"
        rate /= 1000
    raise AssertionError


def format_step(seconds: float) -> str:
    """Return the time of a step: ``431 ms``, ``12.3 s``."""
    return f"{1000 * seconds:.0f} ms" if seconds < 9.9995 else f"{seconds:.1f} s"


def clean_text(text: str) -> str:
    """Replace unprintable characters, such as escape sequences that move the cursor."""
    return "".join(each if each.isprintable() else "?" for each in text)


def join(parts: Iterable[Text], width: int) -> Text:
    """Join as many parts, starting with the first, as fit on a line."""
    line = Text()
    for part in parts:
        if part and line and line.cell_len + 2 + part.cell_len > width:
            break
        line = Text.assemble(line, "  " if part and line else "", part)
    return fit(line, width)


def fit(line: Text, width: int) -> Text:
    """Cut or pad a line to a number of cells."""
    line.truncate(width, overflow="ellipsis", pad=True)
    return line


COLUMN_WIDTH = 79
"""A node's row without notes; wider screens show several columns of nodes, or longer bars."""
_LONGEST_BAR = 40
_GAP = 3
_QUIET_S = 60.0
# Title and width of each column after the bar; the figures are right-aligned.
_COLUMNS = {
    "CPU": 6,
    "REST": 6,
    "MEM": 6,
    "RX/s": 6,
    "TX/s": 6,
    "STEP": 7,
    "SAMPLES/s": 10,
    "COMM": 6,
    "OWN/STEP": 9,
}
_NAME = 9
_FIXED = _NAME + 1 + sum(_COLUMNS.values())


def render_nodes(nodes: Sequence[LiveNode], width: int, room: int | None) -> list[Text]:
    """Return the header and the nodes in the most detailed form that fits."""
    rows = list_rows(nodes)
    if room is None or len(rows) < room:
        return [_header(width), *(_render_row(row, width) for row in rows)]
    columns = min((width + _GAP) // (COLUMN_WIDTH + _GAP), -(-len(nodes) // (room - 1))) or 1
    each = (width + _GAP) // columns - _GAP
    shown = nodes
    if len(nodes) > columns * (room - 1):
        shown = tuple(sorted(nodes, key=_severity))[: columns * (room - 2)]
    lines = [_render_row((node, None), each) for node in shown]
    deep = -(-len(lines) // columns)
    table = [lines[first : first + deep] for first in range(0, len(lines), max(1, deep))]
    titles = [_header(each)] * len(table)
    body = [titles, *zip_longest(*table, fillvalue=Text())] if table else []
    joined = [Text(" " * _GAP).join(line) for line in body]
    if rest := len(nodes) - len(shown):
        joined.append(fit(Text(f"… and {counted(rest, 'more node')}, worst first", DIM), width))
    return joined


def _severity(node: LiveNode) -> int:
    """Return the sort key that puts nodes that need attention first."""
    return 0 if node.error else 1 if node.stragglers else 2


_Row = tuple[LiveNode, "LiveRank | CoreGroup | None"]


def list_rows(nodes: Iterable[LiveNode]) -> list[_Row]:
    """Return each node, followed by its ranks and oneCCL's CPUs."""
    rows: list[_Row] = []
    for node in nodes:
        rows.append((node, None))
        rows += [(node, rank) for rank in node.ranks]
        rows += [(node, g) for g in node.groups if not g.ranks and g.name != "rest"]
    return rows


def _header(width: int) -> Text:
    titles = "".join(f"{title:>{size}}" for title, size in _COLUMNS.items())
    return fit(Text(f"{'NODE':<{_NAME}} {'':<{_bar_width(width)}}{titles}", DIM), width)


def _bar_width(width: int) -> int:
    return min(_LONGEST_BAR, max(4, width - _FIXED - 2))


def _render_row(row: _Row, width: int) -> Text:
    node, part = row
    if part is None and node.error:
        name = set_cell_size(clean_text(node.name), _NAME)
        return fit(Text(f"{name} {clean_text(node.error)}", BAD), width)
    if part is None:
        return _render_line(_describe_node(node), width)
    if isinstance(part, LiveRank):
        return _render_line(_describe_rank(node, part), width)
    cells = {"CPU": f"{part.busy:.0f} %"}
    return _render_line(_Line(f"  {clean_text(part.name)}", part.busy, cells, _cpus(part)), width)


@dataclass(frozen=True)
class _Line:
    name: str
    busy: float
    cells: Mapping[str, str]
    """By the titles of the columns."""
    note: str = ""
    style: str = ""


def _render_line(line: _Line, width: int) -> Text:
    figures = "".join(f"{line.cells.get(title, ''):>{size}}" for title, size in _COLUMNS.items())
    mark = " !" if line.style == SLOW else "  "
    # Notes fit only where bars have their full length.
    note = f" {line.note}" if width - _FIXED - _LONGEST_BAR > len(line.note) else ""
    text = Text.assemble(
        (set_cell_size(line.name, _NAME) + " ", line.style),
        (bar(line.busy / 100, _bar_width(width)), GOOD),
        (figures + mark, line.style),
        (note, SLOW if line.style == SLOW else DIM),
    )
    return fit(text, width)


def _describe_node(node: LiveNode) -> _Line:
    rest, used = node.rest_busy, node.memory - node.available
    cells = {
        "CPU": f"{node.rank_busy:.0f} %",
        "REST": "" if rest is None or not node.ranks else f"{rest:.0f} %",
        "MEM": f"{100 * used / node.memory:.0f} %" if node.memory else "",
        "RX/s": format_rate(node.received),
        "TX/s": format_rate(node.sent),
        **_rank_cells(combine(node.ranks)),
    }
    name = clean_text(node.name)
    if slow := node.stragglers:
        note = f"rank {','.join(str(rank.rank) for rank in slow)} is slow"
        return _Line(name, node.rank_busy, cells, note, SLOW)
    job = f"  {clean_text(node.ranks[0].job)}" if node.ranks else ""
    note = f"{used / 1e9:.0f} of {node.memory / 1e9:.0f} GB{job}"
    return _Line(name, node.rank_busy, cells, note, "bold")


def _describe_rank(node: LiveNode, rank: LiveRank) -> _Line:
    group = node.group_of(rank)
    cells = {"CPU": f"{group.busy:.0f} %" if group else "", **_rank_cells(rank)}
    note = "slower than the others" if rank.straggler else _cpus(group) if group else ""
    if rank.age_s > _QUIET_S:
        note = f"no step for {format_seconds(round(rank.age_s))}"
    busy = group.busy if group else 0.0
    return _Line(f"  rank {rank.rank}", busy, cells, note, SLOW if rank.straggler else "")


def _rank_cells(rank: LiveRank) -> dict[str, str]:
    share, own, samples = rank.communication, rank.own_seconds, rank.samples_per_second
    return {
        "STEP": "" if rank.step is None else str(rank.step),
        "SAMPLES/s": "" if samples is None else f"{samples:.1f}",
        "COMM": "" if share is None else f"{100 * share:.0f} %",
        "OWN/STEP": "" if own is None else format_step(own),
    }


def _cpus(group: CoreGroup) -> str:
    return f"CPUs {clean_text(group.cpus)}" if group.cpus else counted(group.count, "CPU")


_JOBS = 3


def render(snapshot: Snapshot, width: int, height: int | None = None, notice: str = "") -> Text:
    """Return the snapshot as lines of at most ``width`` cells; at most ``height`` lines, if given.

    ``notice`` is a problem of the view itself.
    """
    head = [_render_title(snapshot, width), *_render_jobs(snapshot, width)]
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
    most = "at most " * snapshot.usd_is_most
    parts = [
        Text(snapshot.cluster or "cluster", HEAD),
        Text(counted(len(snapshot.nodes), "node")),
        Text(f"{silent} without an answer", BAD) if silent else Text(),
        Text("" if snapshot.usd is None else f"{most}${snapshot.usd:.2f} so far"),
        _render_ttl(snapshot.ttl_left_s, snapshot.grace_left_s or 0),
        Text(f"{datetime.fromtimestamp(snapshot.time, timezone.utc):%H:%M:%S} UTC", DIM),
    ]
    return join(parts, width)


def _render_ttl(seconds: float | None, grace_s: float) -> Text:
    if seconds is None:
        return Text()
    if seconds <= 0 < grace_s:
        return Text(f"grace: {spoken_duration(grace_s)} left", BAD)
    if seconds <= 0:
        return Text("time to live is over", BAD)
    return Text(f"{spoken_duration(seconds)} to live", SLOW if seconds < 900 else "")


def _render_jobs(snapshot: Snapshot, width: int) -> list[Text]:
    lines = [_render_job(job, snapshot, width) for job in snapshot.jobs]
    if len(lines) > _JOBS:
        rest = counted(len(lines) - _JOBS + 1, "more job")
        lines[_JOBS - 1 :] = [Text(f"… and {rest}", DIM)]
    return lines or [Text("no job is running", DIM)]


def _render_job(job: LiveJob, snapshot: Snapshot, width: int) -> Text:
    ttl_left_s = snapshot.ttl_left_s
    parts = [Text(clean_text(job.job), "bold cyan")]
    if job.step is not None and job.total:
        parts.append(Text(f"step {job.step}/{job.total}"))
        if width >= WIDE:
            share = min(1.0, job.step / job.total)
            parts.append(Text.assemble((bar(share, 20), GOOD), f" {100 * share:.0f} %"))
    trains = job.phase in ("", "train", "running")
    if not trains or job.step is None:
        parts.append(Text(clean_text(job.phase) or "starting"))
    if job.samples_per_second is not None:
        parts.append(Text(f"{job.samples_per_second:.1f} samples/s"))
    if job.left_s is not None and trains:
        late = ttl_left_s is not None and job.left_s > ttl_left_s
        words = " left, but its nodes end sooner" if late else " left"
        parts.append(Text(format_seconds(round(job.left_s)) + words, BAD if late else ""))
    if cost := job.spending(snapshot.time).describe():
        parts.append(Text(cost))
    if job.loss is not None:
        parts.append(Text(f"loss {job.loss:.3f}"))
    if job.score is not None and job.best_score is not None:
        name = clean_text(_SCORES.get(job.metric, job.metric))
        last, best = (format_score(job.metric, each, 2) for each in (job.score, job.best_score))
        parts.append(Text(f"{name} {last}, best {best} after step {job.best_step}"))
    return join(parts, width)


def _render_queue(snapshot: Snapshot, width: int) -> list[Text]:
    if snapshot.queue_error:
        return [fit(Text(f"QUEUE  not known: {clean_text(snapshot.queue_error)}", DIM), width)]
    if not snapshot.queue:
        return [Text("QUEUE  empty", DIM)]
    header = f"{'QUEUE':<8}{'NAME':<27}{'STATE':<12}{'TIME':>11}{'NODES':>7}  WHERE OR WHY"
    lines = [fit(Text(header, DIM), width)]
    for row in snapshot.queue:
        name = set_cell_size(clean_text(row.name), 26)
        state = set_cell_size(clean_text(row.state), 11)
        where = clean_text(row.where or f"({row.reason})")
        # Slurm says 1 of a job that waits for whole nodes.
        where += f", {counted(row.cores, 'core')}" if row.where else ""
        text = f"{row.id[:7]:<8}{name} {state} {row.passed[:11]:>11}{row.nodes:>7}  {where}"
        lines.append(fit(Text(text, "" if row.state == "RUNNING" else DIM), width))
    return lines


def _legend(mark: bool, *, on_screen: bool) -> Text:
    """Return the keys and, if any rank is marked slow, the mark's meaning."""
    longer = f"! computes {100 * (SLOWER - 1):.0f} % longer per step than its job's median"
    return Text("   ".join(["q quits"] * on_screen + [longer] * mark), DIM)


def _shorten_queue(lines: list[Text], room: int, queued: int) -> list[Text]:
    """Return the header, the first jobs, and the number of others; on one line, only the number."""
    if room < 3:
        return [Text(f"QUEUE  {counted(queued, 'job')}", DIM)]
    return [*lines[: room - 1], Text(f"… and {counted(queued - room + 2, 'more job')}", DIM)]
