"""The cluster's options on the command line, made from the table of its fields."""

from __future__ import annotations

from cluster.cli.spec_options import SpecRequest, read_spec_options, spec_options
from cluster.console.options import options_of
from infra.spec import OPTIONS


def test_whether_it_is_a_list_follows_from_the_fields_type() -> None:
    found = {each.name: each for each in (*options_of(SpecRequest), *spec_options())}

    lists = {"instance_types", "read_from", "subnet_ids", "labels", "ssh_cidr"}
    assert {name for name, each in found.items() if each.is_list} == lists
    assert {name for name, each in found.items() if each.repeats} == {"labels"}


def test_every_field_is_an_option_once() -> None:
    found = [each.flags[0] for each in (*options_of(SpecRequest), *spec_options())]

    assert len({*found}) == len(found)
    assert {each.flag for each in OPTIONS.values()} <= {*found}


def test_values_are_read_as_typed() -> None:
    words = {"nodes": 3, "subnet_ids": "subnet-0a, subnet-0b", "labels": ("b=2", "a=1")}

    assert read_spec_options({**words, "amx_required": False}) == {
        "nodes": 3,
        "subnet_ids": ("subnet-0a", "subnet-0b"),
        "labels": (("a", "1"), ("b", "2")),
        "amx_required": False,
    }
