from __future__ import annotations

import pytest

from infra.errors import UsageError
from provision.stacks.compatibility import known_flags, training_flags
from provision.stacks.load import load_stack
from provision.stacks.stack import Stack


def test_a_flag_is_known_from_its_first_release_to_its_last() -> None:
    for flag, known, unknown in (
        ("--xpu_backend", ("4.24.0", "4.31.0"), "4.32.0"),
        ("--use_cpu", ("4.32.0", "5.23.0"), "4.31.0"),
    ):
        assert all(flag in known_flags(version) for version in known)
        assert flag not in known_flags(unknown)
    with pytest.raises(UsageError, match=r"transformers 4.23.1: its training flags are unknown"):
        known_flags("4.23.1")


def with_transformers(stack: str, version: str) -> Stack:
    base = load_stack(stack)
    packages = [p for p in base.python_packages if not p.startswith("transformers")]
    changed = {"python_packages": [*packages, f"transformers=={version}"]}
    return Stack.model_validate({**base.model_dump(), **changed})


def test_what_the_stacks_say() -> None:
    for stack, argv in (
        (load_stack("reference"), "--xpu_backend ccl --use_ipex --no_cuda --bf16"),
        (load_stack("intel"), "--ddp_backend ccl --use_ipex --use_cpu --bf16"),
        (load_stack("upstream"), "--ddp_backend gloo --use_cpu --bf16"),
        # Where both names of the backend are known, the newer is said.
        (with_transformers("intel", "4.30.0"), "--ddp_backend ccl --use_ipex --no_cuda --bf16"),
    ):
        flags = training_flags(stack)
        assert " ".join(flags.argv) == argv
        assert {word for word in flags.argv if word.startswith("--")} <= flags.known


def test_what_can_not_be_said_is_an_error_and_never_left_out() -> None:
    with pytest.raises(UsageError, match=r"does not know --use_ipex\n.*4\.56\.2"):
        training_flags(with_transformers("intel", "4.57.0"))
    without_ipex = {**with_transformers("intel", "5.1.0").model_dump(), "use_ipex": False}
    with pytest.raises(UsageError, match=r"does not know --ddp_backend ccl\n.*5\.0\.0"):
        training_flags(Stack.model_validate(without_ipex))
