"""What a node needs of what pip found here, by the node's own markers."""

from __future__ import annotations

import pytest

from provision.needs import Wheel, find_needs


def names(wheels: tuple[Wheel, ...]) -> list[str]:
    return [wheel.name for wheel in wheels]


@pytest.mark.parametrize(
    ("marker", "needed"),
    [
        ("python_version < '3.11'", True),
        ("python_full_version >= '3.10.12'", True),
        ("python_version >= '3.11'", False),
        ("sys_platform == 'win32'", False),
        ("platform_machine == 'x86_64' and sys_platform == 'linux'", True),
        ("extra == 'test'", False),
        ("extra == 'http'", True),
    ],
)
@pytest.mark.parametrize("there", [True, False])
def test_markers_are_those_of_the_node(marker: str, needed: bool, there: bool) -> None:
    wheels = [Wheel("fsspec", "2025.1", needs=(f"more>=1; {marker}",))]
    wheels += [Wheel("more", "1.2")] if there else []

    found = find_needs(["fsspec[http]"], wheels, "3.10")

    assert names(found.wheels) == ["fsspec", *(["more"] if there and needed else [])]
    assert found.unmet == (("more>=1",) if needed and not there else ())


def test_a_bound_that_only_the_node_has_is_unmet() -> None:
    wheels = [
        Wheel("a", "1", needs=("numpy<2; python_version < '3.11'", "b")),
        Wheel("b", "1", needs=("numpy", "a")),
        Wheel("numpy", "2.1"),
    ]

    assert find_needs(["a==1"], wheels, "3.10").unmet == ("numpy<2",)
    assert find_needs(["a==1"], wheels, "3.12").unmet == ()


def test_local_versions_and_other_spellings_fit_and_odd_words_are_left_out() -> None:
    wheels = [
        Wheel("torch", "2.7.0+cpu", needs=("Typing_Extensions>=4", "odd (words")),
        Wheel("typing-extensions", "4.9"),
    ]

    found = find_needs(["torch==2.7.0"], wheels, "3.10")

    assert (names(found.wheels), found.unmet) == (["torch", "typing-extensions"], ())
