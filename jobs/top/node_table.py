"""The nodes as a table: a row for each node, and for each of its ranks if there is room. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from rich.cells import set_cell_size
from rich.text import Text

from cluster.console.display import format_seconds
from infra.words import counted
from jobs.top.snapshot import CoreGroup, LiveNode, LiveRank, combine
from jobs.top.text_lines import BAD, DIM, GOOD, SLOW, bar, clean_text, fit, format_rate, format_step

COLUMN_WIDTH = 79
"""Of a node's row without notes: wider screens show several columns of nodes, or longer bars."""
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
    """Return a key by which the nodes that need attention come first."""
    return 0 if node.error else 1 if node.stragglers else 2


_Row = tuple[LiveNode, "LiveRank | CoreGroup | None"]


def list_rows(nodes: Iterable[LiveNode]) -> list[_Row]:
    """Return each node, followed by its ranks, and by oneCCL's CPUs."""
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
    # There is room for notes where bars have their full length.
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
    group = node.group_of(rank.rank)
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
