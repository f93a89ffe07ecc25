"""The batch script: golden, and run by bash with stand-ins for Slurm's commands."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import pytest

import jobs.places.script
from jobs.cli.places.folder import write_files
from jobs.cli.train import render_script
from jobs.places.placement import NodeShape
from jobs.places.script.script import INSTALL, SCRIPT, ScriptOptions, SlurmScript, render_slurm
from jobs.train.elsewhere import plan_for_script
from jobs.train.request import TrainRequest, spec_of
from jobs.worker.tasks.squad.task import SquadOptions
from provision.stacks.load import load_stack
from tests.golden import check_golden, compare
from tests.jobs.context import parse_request

NOW = datetime(2026, 11, 22, 14, 25, 1, tzinfo=timezone.utc)
GOLDEN = Path(__file__).with_name("golden")
USUAL = ("--batch-size", "16")
OPTIONS = (
    *(*USUAL, "--shape", "cores=96,numa=2", "--ppn", "4", "--model", "a'b", "--seed", "7"),
    *("--dataset", "me/qa", "--export", "int8", "--report-to", "tensorboard"),
)


def rendered(*words: str) -> SlurmScript:
    shape = ("--to", "slurm-script", "--nodes", "2", "--shape", "cores=32")
    argv = ["train", "squad", *shape, "--job-name", "bert", *words]
    return render_script(parse_request(*argv), NOW)


def text_of(script: SlurmScript, name: str) -> str:
    content = script.files[name.replace("job.sh", SCRIPT)]
    assert isinstance(content, bytes)
    return content.decode()


def test_the_script_and_the_installation() -> None:
    for name in ("job.sh", "install.sh"):
        # The end is a file as it stands.
        end = (Path(jobs.places.script.__file__).parent / name).read_text()
        usual, other = (text_of(rendered(*words), name) for words in (USUAL, OPTIONS))
        assert usual.endswith(end)
        check_golden(GOLDEN / name, usual.removesuffix(end))
        check_golden(GOLDEN / f"all-options.{name}.diff", compare(usual, other))
        for text in (usual, other):
            subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=20)


def test_a_locked_stack_needs_the_python_of_its_lock() -> None:
    line = f"torch==2.13.0 --hash=sha256:{'0' * 64}"
    stack = load_stack("upstream").model_copy(update={"lock": (line,)})
    options = ScriptOptions("bert", 2, NodeShape())
    plan = plan_for_script(TrainRequest(spec_of(SquadOptions()), Path()), stack)
    script = render_slurm(plan, options, stack)

    install = text_of(script, INSTALL)
    assert "condition='sys.version_info[:2] == (3, 12)'" in install
    assert "options='--require-hashes --no-deps'" in install
    assert text_of(script, "requirements.txt").splitlines()[-1] == line


# `srun` trains: it ends by itself (RESULT), or after the signal, with or without a checkpoint (SAVED).
_STAND_INS = {
    # Its parent is a substitution of the script.
    "scontrol": """
[ -z "$EARLY" ] || kill -USR1 "$(cut -d ' ' -f 4 /proc/$PPID/stat)"
if [ "$1" = show ]; then echo node7; else echo "$*" >> requeued; exit "${REFUSED:-0}"; fi
""",
    "scancel": 'echo "$*" >> cancelled; [ ! -e step ] || kill -TERM "$(cat step)"',
    "srun": """
trap '[ -z "$SAVED" ] || mkdir -p output.state/checkpoints/"$SAVED"; exit 143' TERM
printf '%s\\n' "$@" > called; env > environment; echo $$ > step
while [ "$1" != -c ]; do shift; done
echo "$2" > start
[ -z "$RESULT" ] || { mkdir -p output; touch output/results.json; exit; }
kill -USR1 $PPID
while :; do sleep 0.05; done
""",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A job's folder with its environment, and Slurm's commands."""
    folder = tmp_path / "it's here"
    write_files(rendered("--demo", "--ppn", "2").files, folder)
    python = folder / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (folder / "installed").write_bytes(
        b"".join((folder / name).read_bytes() for name in (INSTALL, "requirements.txt"))
    )
    for name, text in _STAND_INS.items():
        stand_in = tmp_path / "bin" / name
        stand_in.parent.mkdir(exist_ok=True)
        stand_in.write_text(f"#!/bin/bash\n{text}\n")
        stand_in.chmod(0o755)
    return folder


def run_script(folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    environ = {
        "PATH": f"{folder.parent / 'bin'}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_ID": "123456",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_NNODES": "2",
        "SLURM_CPUS_ON_NODE": "128",
        "SLURM_JOB_CPUS_PER_NODE": "128,64(x3),96",
        "PMI_RANK": "0",
        "PMI_SIZE": "1",
        "PMIX_RANK": "0",
        "MPI_LOCALRANKID": "0",
        "PYTHONHOME": "/opt/python",
        "HF_HOME": "/home/me/huggingface",
        "EARLY": "",
        "OMP_PLACES": "threads",
        "KMP_AFFINITY": "compact",
        "RESULT": "",
        "SAVED": "",
        **more,
    }
    return subprocess.run(
        ["bash", str(folder / SCRIPT)],
        cwd=folder.parent,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_it_starts_one_torchrun_per_node(folder: Path) -> None:
    done = run_script(folder, RESULT="1")

    assert (done.returncode, done.stderr) == (0, "")
    words = (folder / "called").read_text().splitlines()
    assert {"--ntasks-per-node=1", "--cpus-per-task=64", "--mpi=none"} < set(words)
    ranks = ["--nnodes=2", "--nproc-per-node=2", "--master-addr=node7", "--master-port=23456"]
    at = words.index("start")
    assert words[at + 1 : at + 8] == [*ranks, "-m", "worker.tasks", "squad"]
    assert "--resume" in words
    found = dict(
        line.split("=", 1)
        for line in (folder / "environment").read_text().splitlines()
        if "=" in line
    )
    assert found["OMP_NUM_THREADS"] == "16"
    others = {"OMP_PLACES", "KMP_AFFINITY", "PMI_RANK", "PMI_SIZE", "PMIX_RANK", "MPI_LOCALRANKID"}
    assert {*others, "PYTHONHOME"} & found.keys() == set()
    assert found["PYTHONPATH"] == f"{folder}/code"
    # A login to the hub stays where it is.
    assert found["HF_HOME"] == "/home/me/huggingface"
    assert found["HF_HUB_CACHE"] == f"{folder}/huggingface/hub"
    assert found["HF_DATASETS_CACHE"] == f"{folder}/huggingface/datasets"
    assert not (folder / "requeued").exists()
    # Submitted again, it does not start over.
    (folder / "called").unlink()
    again = run_script(folder)
    assert (again.returncode, (folder / "called").exists()) == (0, False)
    assert "this job is finished" in again.stdout


@pytest.mark.parametrize(
    ("saved", "refused", "code", "said"),
    [
        ("step-000014", "", 0, ""),
        (
            "step-000014",
            "1",
            143,
            "a checkpoint is saved: 'sbatch job.sbatch' resumes the training\n",
        ),
        ("", "", 143, "--time, or write it again with --checkpoint-every STEPS\n"),
        ("step-000014.partial", "", 143, "write it again with --checkpoint-every STEPS\n"),
    ],
)
def test_near_the_time_limit_only_a_job_with_a_new_checkpoint_goes_back_into_the_queue(
    folder: Path, saved: str, refused: str, code: int, said: str
) -> None:
    """Others would start over forever."""
    (folder / "output.state/checkpoints/step-000007").mkdir(parents=True)
    done = run_script(folder, SAVED=saved, REFUSED=refused)

    assert done.returncode == code
    assert done.stderr.endswith(said)
    assert bool(done.stderr) == bool(said)
    assert (folder / "cancelled").read_text() == "--signal=TERM 123456\n"
    asked = folder / "requeued"
    assert (asked.read_text() if asked.exists() else "") == (
        "requeue 123456\n" if saved == "step-000014" else ""
    )


def test_a_signal_before_the_ranks_start_is_a_time_limit_too_short(folder: Path) -> None:
    done = run_script(folder, EARLY="1")

    assert (done.returncode, (folder / "called").exists()) == (1, False)
    assert "submit the job with a longer --time" in done.stderr


def test_a_signal_as_the_ranks_end_does_not_change_the_exit_code(folder: Path) -> None:
    # The ranks are done, and only then does bash handle both signals, in either order.
    (folder.parent / "bin/srun").write_text(
        "#!/bin/bash\nmkdir -p output; touch output/results.json; kill -USR1 $PPID\n"
    )
    codes = {run_script(folder).returncode}
    for _ in range(10):
        (folder / "output/results.json").unlink()
        codes.add(run_script(folder).returncode)

    assert codes == {0}


def test_tcmalloc_is_preloaded_before_other_libraries(folder: Path, tmp_path: Path) -> None:
    run_script(folder, RESULT="1")
    start = (folder / "start").read_text().replace("/usr/lib64/", f"{tmp_path}/")
    library = tmp_path / "libtcmalloc.so.4"
    library.touch()
    start = start.replace("exec venv/bin/python", "printenv LD_PRELOAD; :").replace(
        " /usr/lib/*/libtcmalloc.so.?", ""
    )
    found = [
        subprocess.run(
            ["bash", "-c", start],
            env={"PATH": os.environ["PATH"], "SLURM_NODEID": "0", **more},
            stdout=subprocess.PIPE,
            text=True,
            timeout=20,
            check=True,
        ).stdout
        for more in ({}, {"LD_PRELOAD": "/none/libxalt.so"})
    ]

    assert found == [f"{library}\n", f"{library}:/none/libxalt.so\n"]


def test_it_refuses_what_is_not_installed_to_the_end_for_this_job(folder: Path) -> None:
    (folder / INSTALL).write_text(text_of(rendered("--demo", "--model", "a/b"), INSTALL))
    says = ["is not installed: run 'bash install.sh' there, to its end"] * 2
    says.append("submit the job in its folder, after 'bash install.sh' there")
    for missing, text in zip((None, "installed", "venv/bin/python"), says, strict=True):
        if missing:
            (folder / missing).unlink()
        done = run_script(folder)
        assert (done.returncode, (folder / "called").exists()) == (1, False)
        assert text in done.stderr


# Python that makes a venv with itself; there, pip and the imports may fail.
_PYTHON = """#!/bin/bash
case "$*" in
    "-m venv venv") mkdir -p venv/bin; cp "$0" venv/bin/python ;;
    "-m pip "* | *"import torch"*) echo "$PYTHONPATH" >> modules; exit "${FAILS:-0}" ;;
    *) PYTHON "$@" ;;
esac
"""


def install(folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the installation, with stand-ins for Python's packages and the hub."""
    python = folder / "python"
    python.write_text(_PYTHON.replace("PYTHON ", f"{sys.executable} "))
    python.chmod(0o755)
    (folder / "venv/bin/python").unlink(missing_ok=True)
    show = "\nimport os\n\n\ndef load_{}(*options): print(options, os.environ['HF_HUB_CACHE'])\n"
    with (folder / "code/worker/tasks/squad/dataset.py").open("a") as file:
        file.write(show.format("hub_dataset"))
    # Instead of the whole module, which imports transformers.
    (folder / "code/worker/training/model.py").write_text(show.format("pretrained"))
    return subprocess.run(
        ["bash", str(folder / INSTALL)],
        env={**os.environ, "PYTHON": str(python), "PYTHONPATH": "/opt/modules", **more},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_job_starts_only_after_a_whole_installation(folder: Path) -> None:
    (folder / "installed").unlink()
    failed = install(folder, FAILS="3")
    assert (failed.returncode, run_script(folder).returncode) == (3, 1)
    done = install(folder)
    assert (done.returncode, done.stderr) == (0, "")
    # What a module of the center has there is not the job's.
    assert set((folder / "modules").read_text().split()) == set()
    assert run_script(folder, RESULT="1").returncode == 0
    # An installation that fails afterwards may have changed the packages.
    (folder / "output/results.json").unlink()
    install(folder, FAILS="3")
    assert run_script(folder, RESULT="1").returncode == 1


def test_it_downloads_what_the_job_takes_from_the_hub(folder: Path) -> None:
    script = rendered("--dataset", "me/qa", "--model", "a/b", "--skip-bad-records")
    (folder / INSTALL).write_text(text_of(script, INSTALL))
    lines = install(folder).stdout.splitlines()
    assert lines[:2] == [
        f"{load} {folder}/huggingface/hub"
        for load in ("('a/b', 'QuestionAnswering')", "('me/qa', [])")
    ]


def test_the_installation_refuses_an_old_python(folder: Path, tmp_path: Path) -> None:
    old = tmp_path / "bin/python3.9"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2\nexit 1\n')
    old.chmod(0o755)
    done = subprocess.run(
        ["bash", str(folder / INSTALL)],
        env={**os.environ, "PYTHON": str(old)},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode == 1
    assert "is Python 3.9.2; required: Python 3.10 or newer" in done.stderr
