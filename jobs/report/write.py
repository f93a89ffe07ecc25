"""The report's files: the page, and pictures where they are wished for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.errors import SprError, UsageError
from jobs.report.page import render_page
from jobs.report.parts import Report
from jobs.report.png import draw_png, require_matplotlib

PAGE = "report.html"


@dataclass(frozen=True)
class Written:
    """The files that were made."""

    page: Path
    pictures: Sequence[Path] = ()


def write_report(report: Report, page: Path, *, png: bool) -> Written:
    """Write the page, complete or not at all, and with ``png`` its charts beside it.

    Raises :class:`UsageError` where that can't be.
    """
    if png:
        require_matplotlib()
    if page.is_dir():
        raise UsageError(f"--output {page}: that is a folder", hint=f"--output {page}/{PAGE}")
    partial = page.with_name(f".{page.name}.partial")
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        # A file's own names may hold bytes that are no text.
        partial.write_text(render_page(report), encoding="utf-8", errors="replace")
        partial.replace(page)
    except OSError as error:
        raise UsageError(f"--output {page}: can't be written: {error.strerror}") from None
    return Written(page, _draw(report, page) if png else ())


def _draw(report: Report, page: Path) -> list[Path]:

    pictures = []
    for section in report.sections:
        if section.chart is not None:
            path = page.with_name(f"{page.stem}-{section.name}.png")
            try:
                draw_png(section.chart, path)
            except OSError as error:
                raise SprError(f"{path}: can't be written: {error.strerror}") from None
            pictures.append(path)
    return pictures
