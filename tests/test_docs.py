"""The pages agree with the product: links, the stack, the faults file, and the options of every command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from infra.local.faults import parse_faults
from jobs.cli.commands import COMMANDS
from tests.jobs.cli.test_commands_page import parsers_of

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("benchmarks/*.md"))]


def code_of(page: str, language: str) -> str:
    """Return the only block of a language in a page of docs/."""
    text = (ROOT / "docs" / page).read_text()
    (code,) = re.findall(rf"```{language}\n(.*?)```", text, re.S)
    return str(code)


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
    found = {*re.findall(r"docs/([\w-]+\.md)", (ROOT / "README.md").read_text())}
    assert {page.name for page in ROOT.glob("docs/*.md")} <= found


def test_the_documented_stack_is_the_one_that_ships() -> None:
    shipped = ROOT / "provision" / "stacks" / "upstream.toml"
    assert code_of("add-a-stack.md", "toml") == shipped.read_text()


def test_the_documented_faults_are_valid() -> None:
    text = code_of("embedded-cloud.md", "toml").replace("/path/policy.json", str(ROOT / "none"))
    faults = parse_faults(text)
    assert {*type(faults).model_fields} <= {*re.findall(r"\w+", text)}


@pytest.mark.xfail(reason="options are about to be renamed", strict=True)
def test_documented_commands_have_the_options_that_they_show() -> None:
    parsers = {leaf.prog: leaf for name in COMMANDS for leaf in parsers_of(name)}
    unknown = []
    for page in (page for page in PAGES if page.name != "commands.md"):
        for inline, line in re.findall(
            r"`(spr-cluster [^`]+)`|^ +(?:\$ )?(spr-cluster .*)", page.read_text(), re.M
        ):
            words = re.split(r"  | -- | && |#", inline or line)[0].split()
            progs = (" ".join(words[:n]) for n in (4, 3, 2))
            parser = next((parsers[prog] for prog in progs if prog in parsers), None)
            known = {o for a in parser._actions for o in a.option_strings} if parser else set()
            for word in words:
                if word.startswith("--") and parser and word.partition("=")[0] not in known:
                    unknown.append(f"{page.name}: {parser.prog} {word}")
    assert unknown == []
