"""Every cell of the matrix of matched versions, right and wrong; and every other refusal."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from infra.errors import UsageError
from provision.stacks.compatibility import MATRIX, UBUNTU_PYTHON, check_stack, describe_software
from provision.stacks.load import load_stack, shipped_names
from provision.stacks.stack import Stack, parse_requirement
from tests.golden import check_golden

_GOLDEN = Path(__file__).parent / "golden" / "matched_versions.txt"
# In other spellings, and without a row of their own.
_OTHER_TORCHES = (*("1.13", "1.13.1", "2.5.1", "2.7.0+cpu", "2.7.1", "2.9.0"),)
_UBUNTU = {python: ubuntu for ubuntu, python in UBUNTU_PYTHON.items()}
_BASE = load_stack("upstream").model_dump()


def make_stack(
    torch: str,
    ipex: str | None = None,
    binding: str | None = None,
    python: str = "3.10",
    **changes: object,
) -> Stack:
    packages = [f"torch=={torch}", "transformers==4.40.0", "impi-rt==2021.18.1"]
    packages += [f"intel-extension-for-pytorch=={ipex}"] if ipex else []
    packages += [f"oneccl_bind_pt=={binding}"] if binding else []
    wishes = {
        "name": "mine",
        "ubuntu": _UBUNTU.get(python, "22.04"),
        "python": python,
        "backend": "ccl" if binding else "gloo",
        "use_ipex": bool(ipex),
        "python_packages": packages,
        **changes,
    }
    return Stack.model_validate({**_BASE, **wishes})


def refused(stack: Stack) -> UsageError:
    with pytest.raises(UsageError) as caught:
        check_stack(stack)
    assert caught.value.message.startswith(f"stack {stack.name}: ")
    return caught.value


def versions_of(pattern: str) -> list[str]:
    """Return releases that a row of the matrix means."""
    return sorted({pattern.replace("*", last) for last in ("0", "100")})


def judge(torch: str, ipex: str | None, binding: str | None) -> str:
    """Return what is wrong with three versions, on any Python that has wheels, or "ok"."""
    refusals = []
    for python in _UBUNTU:
        try:
            check_stack(make_stack(torch, ipex, binding, python))
            return "ok"
        except UsageError as error:
            refusals.append(error)
    told = min(refusals, key=lambda error: "has no wheels" in error.message)
    return f"{told.message.removeprefix('stack mine: ')}; {told.hint}"


def test_only_matched_versions_pass() -> None:
    torches = [match.torch.replace("*", "0") for match in MATRIX]
    packages = [version for match in MATRIX for each in match.ipex for version in versions_of(each)]
    modules = [version for match in MATRIX for version in versions_of(match.binding)]
    lines = []
    for torch in (*torches, *_OTHER_TORCHES):
        ipex = [each for each in packages if judge(torch, each, None) == "ok"]
        bindings = [each for each in modules if judge(torch, None, each) == "ok"]
        pairs = [judge(torch, *pair) for pair in itertools.product(ipex, bindings)]
        assert set(pairs) <= {"ok"}
        # Only the wheels of Intel's packages are for fewer Pythons.
        one, other = (ipex[0], bindings[0]) if pairs else (None, None)
        told = refused(make_stack(torch, one, other, "3.5"))
        lines += [f"{told.message.removeprefix('stack mine: ')}; {told.hint}"]
        lines += [f"torch {torch}: IPEX {', '.join(ipex)}; bindings {', '.join(bindings)}"]
        lines += [f"  {judge(torch, '1.0.0', None)}", f"  {judge(torch, None, '1.0.0')}"]

    check_golden(_GOLDEN, "".join(f"{line}\n" for line in lines))


def test_torch_alone_has_other_pythons() -> None:
    for torch, python in (
        *(("1.10.0", "3.8"), ("1.12.1", "3.10"), ("2.2.0", "3.12"), ("2.15.0", "3.12")),
    ):
        check_stack(make_stack(torch, python=python))
    for torch, python in (("1.10.0", "3.10"), ("2.5.0", "3.8"), ("2.15.0", "3.10")):
        message = refused(make_stack(torch, python=python)).message
        assert f"torch {torch} has no wheels for Python {python}, only for Python" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ubuntu": "24.04"}, "Ubuntu 24.04 comes with Python 3.12, not 3.10"),
        ({"backend": "ccl"}, "backend ccl needs oneccl-bind-pt"),
        ({"use_ipex": True}, "use_ipex needs intel-extension-for-pytorch"),
        ({"python_packages": ["transformers==4.40.0"]}, "torch is missing"),
        ({"python_packages": ["torch==2.7.0"]}, "transformers is missing"),
        (
            {"python_packages": ["torch==2.7.0", "transformers==4.40.0"]},
            "launcher mpirun needs impi-rt",
        ),
        ({"python_packages": ["torch>=2.7", "transformers==4.40.0"]}, "torch>=2.7 is not an exact"),
        ({"python_packages": ["torch==2.7.0rc1"]}, "torch==2.7.0rc1 is not an exact release"),
        ({"python_packages": ["torch==2.*", "a; b"]}, "'a; b': expected a requirement"),
        ({"python_packages": ["torch==2.*", "transformers==4.40.0"]}, "torch==2.* is not an exact"),
        (
            {"python_packages": ["torch==2.7.0", "transformers==4.40.0", "impi-rt==2021.19.0"]},
            "impi-rt 2021.19.0 can't be installed",
        ),
    ],
)
def test_other_mistakes_are_rejected(changes: dict[str, object], message: str) -> None:
    assert message in str(refused(make_stack("2.7.0", **changes)))  # type: ignore[arg-type]


def test_what_a_stack_contains() -> None:
    assert describe_software(load_stack("intel")) == (
        "stack intel (PyTorch 2.7, IPEX 2.7, oneCCL bindings 2.7, transformers 4.56, "
        "Intel MPI 2021.18, tcmalloc)."
    )


@pytest.mark.parametrize("name", shipped_names())
def test_what_ships_is_matched_with_the_examples_of_its_transformers(name: str) -> None:
    stack = load_stack(name)  # which checks it
    assert stack.examples.endswith(f"/v{stack.pin('transformers')}.tar.gz")


def test_a_release_candidate_is_accepted_in_its_range_and_an_odd_version_never() -> None:
    found = parse_requirement("torch>=2.1,!=2.3")
    assert found
    accepted = [found.accepts(each) for each in ("2.9.0rc1", "2.10+cpu", "2.3", "unknown")]
    assert accepted == [True, True, False, False]
