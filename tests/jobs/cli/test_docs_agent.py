"""The guide for agents: complete, because it is made from the parsers."""

from __future__ import annotations

import re

import yaml

from jobs.cli import COMMANDS
from jobs.cli.setup.docs import render_guide


def test_the_guide_has_every_command_with_its_options_and_json() -> None:
    guide = render_guide()
    before, header, text = guide.split("---\n", 2)
    skill = yaml.safe_load(header)
    assert (before, {*skill}, text[:2]) == ("", {"name", "description"}, "\n#")
    assert re.fullmatch(r"(?!-)(?!.*--)[a-z0-9-]{1,64}(?<!-)", skill["name"])
    assert 1 <= len(skill["description"].strip()) <= 1024
    assert guide.count("\n    spr-cluster ") > len([c for c in COMMANDS.values() if c.help])
    for name, command in COMMANDS.items():
        assert (f"\n`{name}`: {command.help}\n" in guide) is bool(command.help), name
    (up,) = re.findall(r"^    spr-cluster up .*", guide, re.MULTILINE)
    for option in ("[--name NAME]", "[--nodes NODES]", "[--dry-run]", "[--json]"):
        assert option in up
    json_commands = guide.partition("# JSON output")[2]
    named = set(
        re.findall(r"`([a-z0-9-]+)[^`]*`", "\n".join(re.findall(r"(?m)^- ([^:]*):", json_commands)))
    )
    assert named <= COMMANDS.keys(), named - COMMANDS.keys()
