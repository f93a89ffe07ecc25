from __future__ import annotations

import pytest

from infra.errors import UsageError
from provision.stacks.compatibility import known_flags, training_flags
from provision.stacks.load import load_stack
from provision.stacks.stack import Stack


@pytest.mark.parametrize(
    ("flag", "version", "is_known"),
    [
        ("--xpu_backend", "4.24.0", True),
        ("--xpu_backend", "4.31.0", True),
        ("--xpu_backend", "4.32.0", False),
        ("--use_cpu", "4.31.0", False),
        ("--use_cpu", "4.32.0", True),
        ("--use_cpu", "5.23.0", True),
    ],
)
def test_a_flag_is_known_from_its_first_release_to_its_last(
    flag: str, version: str, is_known: bool
) -> None:
    assert (flag in known_flags(version)) is is_known


def test_the_flags_of_older_releases_are_unknown() -> None:
    with pytest.raises(UsageError, match=r"transformers 4.23.1: its training flags are unknown"):
        known_flags("4.23.1")


def with_transformers(stack: str, version: str) -> Stack:
    base = load_stack(stack)
    packages = [p for p in base.python_packages if not p.startswith("transformers")]
    changed = {"python_packages": [*packages, f"transformers=={version}"]}
    return Stack.model_validate({**base.model_dump(), **changed})


@pytest.mark.parametrize(
    ("stack", "argv"),
    [
        ("reference", "--xpu_backend ccl --use_ipex --no_cuda --bf16"),
        ("intel", "--ddp_backend ccl --use_ipex --use_cpu --bf16"),
        ("upstream", "--ddp_backend gloo --use_cpu --bf16"),
    ],
)
def test_what_the_stacks_say(stack: str, argv: str) -> None:
    flags = training_flags(load_stack(stack))
    assert " ".join(flags.argv) == argv
    assert {word for word in flags.argv if word.startswith("--")} <= flags.known


def test_where_both_names_of_the_backend_are_known_the_newer_is_said() -> None:
    argv = training_flags(with_transformers("intel", "4.30.0")).argv
    assert argv == ("--ddp_backend", "ccl", "--use_ipex", "--no_cuda", "--bf16")


def test_what_can_not_be_said_is_an_error_and_never_left_out() -> None:
    with pytest.raises(UsageError, match=r"does not know --use_ipex\n.*4\.56\.2"):
        training_flags(with_transformers("intel", "4.57.0"))
    without_ipex = {**with_transformers("intel", "5.1.0").model_dump(), "use_ipex": False}
    with pytest.raises(UsageError, match=r"does not know --ddp_backend ccl\n.*5\.0\.0"):
        training_flags(Stack.model_validate(without_ipex))
