"""The site of these pages: `make docs`. Its root is the repository, so links to other files work."""

import shutil
from pathlib import Path
from typing import Any

_GUIDES = (
    "getting-started recipes clusters aws-account software verify training run projects jobs tuning"
)
_GUIDES += " top notebooks python-api slurm kubernetes"
GROUPS = {
    "Guides": [f"docs/{page}" for page in _GUIDES.split()],
    "Explanations": [
        *("docs/lifecycle", "docs/recovery", "docs/speed", "docs/embedded-cloud"),
        *("docs/architecture", "docs/status"),
    ],
    "Reference": [
        *("docs/commands", "docs/reference", "jobs/cli/setup/json_output", "benchmarks/results"),
        "CHANGELOG",
    ],
    "Contribute": ["CONTRIBUTING", "SECURITY", "docs/aws-check", "benchmarks/README"],
}

project = "spr-cluster"
project_copyright = "Apache 2.0"
root_doc = "README"
extensions = ["myst_parser"]
include_patterns = ["*.md", "docs/*.md", "benchmarks/*.md", "jobs/cli/setup/json_output.md"]
exclude_patterns = [".*", "build"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = project
html_show_sphinx = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]
smartquotes = False
html_show_sourcelink = False


def add_groups(_: Any, name: str, source: list[str]) -> None:
    """List all pages below the README, in groups, for the sidebar."""
    if name != root_doc:
        return
    for title, pages in GROUPS.items():
        lines = "\n".join(pages)
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{lines}\n```\n"


def add_index(app: Any, error: Exception | None) -> None:
    """Make the README the first page."""
    if not error:
        shutil.copy(Path(app.outdir, "README.html"), Path(app.outdir, "index.html"))


def setup(app: Any) -> None:
    app.connect("source-read", add_groups)
    app.connect("build-finished", add_index)
