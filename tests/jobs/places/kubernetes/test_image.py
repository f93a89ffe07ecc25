"""The image: the stack's own data in a Dockerfile, and our code as the nodes get it."""

from __future__ import annotations

from pathlib import Path

from jobs.places.kubernetes.image import build_files, render_dockerfile
from provision.stacks.load import load_stack
from provision.stacks.stack import render_requirements
from tests.golden import check_golden, compare
from tests.harness.forked import Forked

GOLDEN = Path(__file__).with_name("golden")


def test_the_dockerfile_of_every_stack() -> None:
    intel = load_stack("intel")
    base, packages = render_dockerfile(intel, "me/spr:1"), render_requirements(intel)
    check_golden(GOLDEN / "intel.Dockerfile", f"{base}\n# requirements.txt\n{packages}")
    for name in ("reference", "upstream"):
        text = render_dockerfile(load_stack(name), "me/spr:1")
        check_golden(GOLDEN / f"{name}.Dockerfile.diff", compare(base, text))


def test_a_locked_stack_is_installed_from_its_lock() -> None:
    line = f"torch==2.13.0 --hash=sha256:{'0' * 64}"
    stack = load_stack("upstream").model_copy(update={"lock": (line,)})

    assert " --require-hashes --no-deps --requirement " in render_dockerfile(stack, "x")


def test_the_code_runs_from_the_build_folder_alone(tmp_path: Path) -> None:
    for name, source in build_files(load_stack("upstream"), "x").items():
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source if isinstance(source, bytes) else source.read_bytes())

    words = ["-m", "worker.tasks", "squad", '{"epochs": 20000}']
    code = tmp_path / "code"
    _, said = Forked(words, code, {"PYTHONPATH": str(code)}).finish(120)

    assert "ValueError: --epochs 20000 is out of range: 0 to 10000" in said
    assert (tmp_path / "code/worker/tasks/squad/sample.json").is_file()
