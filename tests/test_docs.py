"""The pages agree with the product: links, paths, the faults file, and the options of every command."""

from __future__ import annotations

import ast
import html
import re
import runpy
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import botocore.session
import pytest
import yaml
from botocore import xform_name

from jobs.cli import COMMANDS, SHORT_FORMS
from tests.cloud.faults import parse_faults
from tests.jobs.cli.test_commands_page import parsers_of

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("benchmarks/*.md")),
]
FOLDERS = ("infra", "provision", "cluster", "jobs", "spr_cluster")
PARSERS = {leaf.prog: leaf for name in COMMANDS for leaf in parsers_of(name)}
OPTIONS = {o for parser in PARSERS.values() for a in parser.options for o in a.flags} | {
    "--help",
    "--advanced",
    "--version",
}
OTHER_PROGRAMS = [
    path.read_text()
    for folder in ("benchmarks", "tests")
    for path in ROOT.glob(f"{folder}/**/*.py")
]
CODE = "\n".join(
    path.read_text()
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".sh", ".toml", ".conf", ".cfg")
)
IN_REPOSITORY = [
    str(path.relative_to(ROOT))
    for folder in (*FOLDERS, "tests")
    for path in (ROOT / folder).rglob("*")
    if "__pycache__" not in path.parts
]
PROGRAMS = {
    *("apt-get", "aws", "cloud-init", "git", "kubectl", "lscpu", "mkdir", "mpirun", "pip"),
    *("ps", "rsync", "sbatch", "scontrol", "sinfo", "squeue", "srun", "sudo"),
    *("systemctl", "systemd-run", "tar", "timeout", "torchrun", "uv"),
}
"""Messages that name one of them may have its options."""
NEW_PATHS = {"jobs/worker/tasks/rate.py", "cluster/cli/zones.py"}
"""Files that a page lets the reader create."""
AWS_SERVICES = (
    "account",
    "ec2",
    "iam",
    "kms",
    "s3api",
    "scheduler",
    "service-quotas",
    "ssm",
    "sts",
)
FOREIGN_OPTIONS = {
    "--exclusive": "of sbatch",
    "--flag": "any",
    "--hash": "of pip",
    "--index-url": "of pip",
    "--link-dest": "of rsync",
    "--mem": "of sbatch",
    "--monitoring": "of a recipe in CONTRIBUTING.md",
    "--no-": "a part of one",
    "--no-X": "any that cancels one",
    "--no-detach": "such a one",
    "--no-requeue": "of sbatch",
    "--profile": "of the AWS CLI",
    "--pytorch-init-container-template-file": "of Training Operator",
    "--from": "of uvx",
    "--task": "of optimum-cli",
    "--time": "of sbatch",
    "--weight-format": "of optimum-cli",
    "--for": "of kubectl",
    "--trial-seconds": "of the worker",
}


FIGURE = re.compile(
    r"(?<![\w.,$-])(\d[\d.]*(?: to \d[\d.]*)? (?:times|%|m?s|seconds|points))(?!\w)"
)
NOT_MEASURED = {
    "jobs.md": {"95 %"},
    "kubernetes.md": {"30 s"},
    "lifecycle.md": {"90 seconds"},
    "recovery.md": {"2 %", "20 s", "10 times", "5 s", "10 s", "30 s", "45 s"},
    "slurm.md": {"30 s", "180 s"},
    "speed.md": {"69 %", "95 %"},
    "top.md": {"20 seconds", "1.2 times", "5 seconds"},
    "training.md": {"5 %", "97.5 %"},
    "tuning.md": {"90 %"},
    "verify.md": {"1 ms", "30 %"},
}
"""Figures that the code, another program, or a definition sets."""


def anchors_of(page: Path) -> set[str]:
    titles = re.findall(r"(?m)^#+ (.*)", page.read_text())
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_link_leads_somewhere() -> None:
    broken = []
    for page in PAGES:
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and anchor not in anchors_of(target)):
                broken.append(f"{page.name}: {link}")
    assert not broken


def test_every_page_is_reachable_from_the_readme() -> None:
    found, new = {ROOT / "README.md"}, {ROOT / "README.md"}
    while new:
        links = [
            (p.parent / x) for p in new for x in re.findall(r"\]\(([^()#:]+\.md)", p.read_text())
        ]
        new = {path.resolve() for path in links} - found
        found |= new
    assert {*ROOT.glob("docs/*.md")} <= found


def test_the_site_has_each_page_once() -> None:
    groups = runpy.run_path(str(ROOT / "docs/site/conf.py"))["GROUPS"]
    listed = [f"{page}.md" for pages in groups.values() for page in pages]
    expected = {*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")}
    expected |= {*ROOT.glob("jobs/cli/setup/json*.md")}
    assert sorted(listed) == sorted(
        str(path.relative_to(ROOT)) for path in expected if path != ROOT / "README.md"
    )


def test_the_documented_faults_are_valid() -> None:
    page = (ROOT / "tests/cloud/README.md").read_text()
    (text,) = re.findall(r"```toml\n(.*?)```", page, re.S)
    faults = parse_faults(text.replace("/path/policy.json", str(ROOT / "none")))
    assert {*type(faults).model_fields} <= {*re.findall(r"\w+", text)}


def measured() -> Iterator[tuple[str, str]]:
    """Yield the pages and the figure of each row of results.md."""
    for row in (ROOT / "benchmarks/results.md").read_text().splitlines():
        cells = [cell.strip() for cell in row.split("|")[1:-1]]
        if len(cells) == 7 and cells[0] != "claim" and cells[0].strip("-"):
            assert all(cells), row
            yield from ((page, cells[2]) for page in cells[1].split(", "))


def test_results_have_each_measured_figure_of_the_pages_and_no_other() -> None:
    shown: dict[str, str] = {}
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md")):
        prose = re.sub(r"(?s)```.*?```", "", page.read_text()).replace("**", "")
        shown[page.name] = " ".join(prose.split()) if page.name != "commands.md" else ""
    chart = re.findall(r">([\d.]+) ×</text>", (ROOT / "docs/speed.svg").read_text())
    shown["speed.svg"] = " ".join(f"{each} times" for each in chart if "." in each)
    rows = {*measured()}
    found = {(page, figure) for page, text in shown.items() for figure in FIGURE.findall(text)}
    given = {(page, each) for page, figures in NOT_MEASURED.items() for each in figures}
    assert found - rows == given - rows
    # The unit may be that of another figure: "3.0 (Zen 4) and 3.7 times".
    stale = {(page, figure) for page, figure in rows if figure.split(" ")[0] not in shown[page]}
    assert not stale


def strings_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield every text of a module with its line; "…" stands for a value in it."""
    parts: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts.update(node.values)
            words = (str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values)
            yield node.lineno, "".join(words)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts:
            yield node.lineno, node.value


@cache
def texts_of_the_product() -> list[tuple[str, str]]:
    """Return every text in the product's code, after where it is."""
    return [
        (f"{path.relative_to(ROOT)}:{line}", text)
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for line, text in strings_of(ast.parse(path.read_text()))
    ]


def test_the_recording_has_the_words_of_today() -> None:
    """Each step that it shows is a text of the product, and each command exists."""
    texts = {text for _, text in texts_of_the_product()}
    svg = html.unescape((ROOT / "docs/recording.svg").read_text())
    lines = {re.sub(r"<[^>]+>", "", row) for row in re.findall(r'<text id="r\d+">(.*)</text>', svg)}
    steps = {found[1] for line in lines if (found := re.match(r"\s*✓ +(.*?)\s+[\d.]+ s$", line))}
    assert len(steps) > 15
    # The rest is of this cluster: "Terminate: i-123".
    heads = {re.split(r": | spr\b| squad-| \d", step)[0] for step in steps}
    assert {head for head in heads if not any(text.startswith(head) for text in texts)} == set()
    commands = {line[2:] for line in lines if line.startswith("$ spr-cluster ")}
    whole = {
        each for each in commands if not any(o != each and o.startswith(each) for o in commands)
    }
    assert [unknown for each in whole for unknown in unknown_in(each)] == []
    assert {each.split()[1] for each in whole} == {"up", "train", "top", "attach", "down"}


@cache
def commands_of_the_product() -> dict[str, set[str]]:
    """Return what :func:`commands_in` finds in the pages and in every text in the product's code.

    These texts are help, hints, messages, and docstrings; the keys say where each command is.
    """
    found = {}
    for page in [*PAGES, *ROOT.glob("jobs/cli/setup/*.md"), ROOT / "CHANGELOG.md"]:
        found[page.name] = set(commands_in(page.read_text()))
    for where, text in texts_of_the_product():
        found[where] = {*commands_in(text), *bare_options_in(text)}
    return found


def commands_in(text: str) -> Iterator[str]:
    """Yield what a reader takes for code: in backquotes, in indented lines, or after our name."""
    text = re.sub(r"```.*?```", "", text, flags=re.S).replace("``", "`")
    for line in re.findall(r"(?m)^ {2,}(?:\$ )?(spr-cluster .*)", text):
        yield re.split(r"  | && |#", line)[0]
    yield from (" ".join(each.split()) for each in re.findall(r"`([^`\n]+(?:\n[^`\n]+)?)`", text))
    yield from re.findall(r"spr-cluster [a-z0-9-]+(?: --[\w-]+(?: [^\s-][^\s;:,)]*)?)+", text)


def bare_options_in(text: str) -> Iterator[str]:
    """Yield the options in a message that has no backquotes, unless it is another program's command."""
    if " " in text and text[0] != "-" and not PROGRAMS & {*re.findall(r"[\w-]+", text)}:
        yield from re.findall(r"(?<![\w`-])--[a-z][\w-]*", text)


def unknown_in(command: str) -> Iterator[str]:
    """Yield the options of a command that don't exist, and a command of ours that doesn't."""
    words = command.split(" -- ")[0].split()
    ours = words[:1] == ["spr-cluster"]
    words = words[1:] if ours else words
    if ours and words[:1] and words[0] in SHORT_FORMS:
        words = [SHORT_FORMS[words[0]][0], *words[1:]]
    words = words[1:] if words[:1] == ["config"] and words[1:2] and words[1] in COMMANDS else words
    progs = (" ".join(["spr-cluster", *words[:n]]) for n in (3, 2, 1))
    parser = next((PARSERS[prog] for prog in progs if prog in PARSERS), None)
    if ours and words and words[0].isalnum() and words[0].islower() and words[0] not in COMMANDS:
        yield f"spr-cluster {words[0]}"
    if not ours and parser is None and words and not words[0].startswith("-"):
        return  # another program's, or no command at all
    known = {o for a in parser.options for o in a.flags} | {"--help"} if parser else OPTIONS
    given = [match[0] for word in words if (match := re.match(r"--[a-z][\w-]*", word))]
    yield from (word for word in given if word not in known and "_" not in word)


def is_elsewhere(option: str, where: str) -> bool:
    """Return whether an option is one of a benchmark or of another program that a page speaks of.

    results.md keeps the command lines of what was measured, also of benchmarks that were removed.
    """
    if where == "results.md":
        return True
    if where in ("README.md", "aws-check.md", "run.md"):
        return any(f'"{option}"' in text for text in OTHER_PROGRAMS)
    return option in FOREIGN_OPTIONS


@pytest.mark.parametrize("text", ["`up --disk` makes", "try spr-cluster up --disk 9", "`--disk`"])
def test_an_option_that_does_not_exist_is_found(text: str) -> None:
    assert [*chain(*map(unknown_in, commands_in(text)))] == ["--disk"]


def test_options_in_pages_help_and_hints_exist() -> None:
    unknown = {
        f"{where}: {option} in {command!r}"
        for where, commands in commands_of_the_product().items()
        for command in commands
        for option in unknown_in(command)
        if not is_elsewhere(option, where)
    }
    assert not unknown


@cache
def aws_calls() -> dict[str, set[str]]:
    """Return the calls of the AWS command line in pages and messages, with their options."""
    texts = [*(page.read_text() for page in PAGES), *(text for _, text in texts_of_the_product())]
    found: dict[str, set[str]] = {}
    for text in texts:
        for call, options in re.findall(
            rf"\baws ((?:{'|'.join(AWS_SERVICES)}) [a-z][a-z-]+)((?:\s+--[a-z-]+(?:\s+[^\s`-]\S*)?)*)",
            text,
        ):
            found.setdefault(call, set()).update(re.findall(r"--([a-z-]+)", options))
    return found


def test_every_call_of_the_aws_command_line_exists() -> None:
    assert len(aws_calls()) >= 10
    session = botocore.session.get_session()
    for call, options in aws_calls().items():
        service, name = call.split()
        model = session.get_service_model(service.removesuffix("api"))
        names = {xform_name(each, "-"): each for each in model.operation_names}
        assert name in names, call
        shape = model.operation_model(names[name]).input_shape
        known = {xform_name(each, "-") for each in (shape.members if shape else ())}
        assert options <= {*known, "region", "profile", "query", "output"}, (call, options - known)


def paths_in(commands: Iterable[str]) -> Iterator[str]:
    for command in commands:
        if re.fullmatch(r"(?!-)[~.]?[\w/.-]*/[\w/.-]*", command) and command != "/":
            yield command


def path_exists(path: str) -> bool:
    """Return whether a path is one of the repository, or its parts are names in the product's code."""
    parts = [part for part in path.split("/") if part not in ("", "~", ".", "..")]
    if parts[0] in {*FOLDERS, "tests", "docs", "benchmarks"}:
        return (ROOT / path).exists() or "NAME" in path
    if any(f"/{each}/".endswith(f"/{'/'.join(parts)}/") for each in IN_REPOSITORY):
        return True
    fixed = [part for part in parts if not re.fullmatch(r"[A-Z]+", part)]
    return all(re.search(rf"(?<![\w.-]){name_of(part)}(?![\w-])", CODE) for part in fixed)


def name_of(part: str) -> str:
    """Return a pattern for a name, in which N, NAME, and the like stand for a value in braces."""
    return re.sub(r"\\?-?\b(N|REGION|NAME)\b", ".*", re.escape(part))


@pytest.mark.parametrize("path", ["~/spr-job/JOB/", "docs/none.md", "results/JOB/jib/log"])
def test_a_path_that_does_not_exist_is_found(path: str) -> None:
    assert [each for each in paths_in(commands_in(f"see `{path}`")) if not path_exists(each)] == [
        path
    ]


def test_paths_in_pages_help_and_hints_exist() -> None:
    unknown = {
        f"{where}: {path}"
        for where, commands in commands_of_the_product().items()
        for path in paths_in(commands)
        if path not in NEW_PATHS and not path_exists(path)
    }
    assert not unknown


def test_changelog_and_citation_name_the_release() -> None:
    release = re.findall(r'(?m)^_RELEASE = "(.*)"', (ROOT / "infra/version.py").read_text())
    titles = re.findall(r"(?m)^## \[(\d.*)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text())
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (release, titles[0]) == (
        [cited["version"]],
        (cited["version"], cited["date-released"]),
    )
