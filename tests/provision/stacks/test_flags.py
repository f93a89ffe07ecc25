from __future__ import annotations

import pytest

from infra.errors import UsageError
from provision.stacks.compatibility import known_flags, training_flags
from provision.stacks.load import load_stack
from provision.stacks.stack import Stack

# (flag, the last release without it before, the first with it, the last with it, the first without)
BOUNDARIES = [
    ("--xpu_backend", None, "4.24.0", "4.31.0", "4.32.0"),
    ("--ddp_backend", "4.28.1", "4.29.0", "5.23.0", None),
    ("--no_cuda", None, "4.24.0", "4.57.0", "5.0.0"),
    ("--use_cpu", "4.31.0", "4.32.0", "5.23.0", None),
    ("--use_ipex", None, "4.24.0", "4.56.2", "4.57.0"),
    ("--bf16", None, "4.24.0", "5.23.0", None),
    ("--overwrite_output_dir", None, "4.24.0", "4.57.0", "5.0.0"),
    ("--group_by_length", None, "4.24.0", "5.1.0", "5.2.0"),
    ("--train_sampling_strategy", "5.1.0", "5.2.0", "5.23.0", None),
]


@pytest.mark.parametrize(("flag", "before", "first", "last", "after"), BOUNDARIES)
def test_every_boundary(
    flag: str, before: str | None, first: str, last: str, after: str | None
) -> None:
    assert flag in known_flags(first)
    assert flag in known_flags(last)
    for without in filter(None, (before, after)):
        assert flag not in known_flags(without)


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
