from __future__ import annotations

import pytest

from provision.stacks.stack import fits, parse_requirement, release


@pytest.mark.parametrize(
    ("text", "name", "pinned"),
    [
        ("torch==2.7.0", "torch", "2.7.0"),
        ("torch == 2.7.0+cpu", "torch", "2.7.0"),
        ("oneccl_bind_pt==1.13", "oneccl-bind-pt", "1.13"),
        ("Intel.Extension_For-PyTorch==2.7.0", "intel-extension-for-pytorch", "2.7.0"),
        ("huggingface_hub[hf_xet]>=0.30,<1", "huggingface-hub", None),
        ("numpy<2.4", "numpy", None),
        ("numpy", "numpy", None),
        ("numpy==2.*", "numpy", None),
    ],
)
def test_a_requirement(text: str, name: str, pinned: str | None) -> None:
    found = parse_requirement(text)
    assert found
    assert (found.name, found.pinned) == (name, pinned)


@pytest.mark.parametrize(
    "text", ["", "--pre", "torch=2", "torch==", "a; b", "$(id)", "torch @ https://x/", "a b"]
)
def test_invalid_requirements(text: str) -> None:
    assert parse_requirement(text) is None


@pytest.mark.parametrize(
    ("text", "version", "accepted"),
    [
        ("a==1.13", "1.13.0+cpu", True),
        ("a==1.13", "1.13.1", False),
        ("a==1.13+cpu", "1.13+cpu", True),
        ("a==1.13", "unknown", False),
        ("a>=1.2,!=1.3,<2", "1.10", True),
        ("a<2", "2.0.0rc1", False),
    ],
)
def test_bounds(text: str, version: str, accepted: bool) -> None:
    found = parse_requirement(text)
    assert found
    assert found.accepts(version) is accepted


def test_trailing_zeros_do_not_matter() -> None:
    assert release("1.13") == release("1.13.0+cpu")
    assert release("2.10.0") > release("2.9.1")
    assert fits("2.0", "2.0.*")
    assert fits("2.0.100", "2.0.*")
    assert not fits("2.10.0", "2.1.*")
    assert not fits("2.1.0", "2.1.1")
