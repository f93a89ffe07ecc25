"""Whatever a file contains, its reader returns a value or raises an error that the user understands.

Here are the readers of files without a checksum: the user's, those in the tool's home and results folders, on
the head, and on the nodes. Each gets random bytes, damaged files, and values of the wrong shape.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import random
import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.local_files import ClusterFiles, EventLog, cluster_names, remembered_cloud
from cluster.nodes import Cluster
from infra.ec2.key_pair import generate_key_pair, read_public
from infra.errors import SprError
from infra.local.state import ServerAddress, StateFolder, load_snapshot, save_snapshot
from jobs.__main__ import main
from jobs.cli.bench import render
from jobs.cli.shared.job_display import render_result
from jobs.experiments.bench import AllReduce, BenchResult, NodeSpeed, read_last_speeds
from jobs.places.files import fetch
from jobs.places.plan import JobPaths
from jobs.places.queue.history import list_jobs
from jobs.places.record import read_job_id, read_record
from jobs.program.packages import find_packages
from jobs.program.pyproject import read_own_package
from jobs.reference import plan as reference
from jobs.reference.plan import PRESETS
from jobs.top.screen import render as render_screen
from jobs.top.snapshot import parse_snapshot
from jobs.train import predict as asking
from jobs.train.predict import read_context
from jobs.train.request import TrainRequest, check_inputs, spec_of
from jobs.train.resume import ResumeRequest, plan_again
from jobs.train.train import apply_tuned, read_results
from jobs.train.tuned import TuningKey, TuningResult, read_tuned
from jobs.worker.program.environment import program_environment
from jobs.worker.runtime.errors import WorkerError
from jobs.worker.runtime.events import parse_event
from jobs.worker.runtime.output import Metrics
from jobs.worker.runtime.process import read_words
from jobs.worker.tasks import predict
from jobs.worker.tasks.squad.task import SAMPLE, SquadOptions
from provision.facts import gather_facts
from provision.host_keys import check_pinned_keys, pin_host_keys, pinned_host_keys
from provision.on_node.sampler import read_tail
from provision.stacks.load import load_stack
from provision.stacks.lock import Pinned, read_lock, render_lock, requirements
from provision.stacks.stack import parse_requirement
from tests.fakes import FakeHost, facts_answer
from tests.jobs.context import SUBMITTED
from tests.jobs.report.sample_runs import make_results
from tests.jobs.top.samples import make_line, make_node

DEEP = 100_000
KEY = generate_key_pair("")
STACK = load_stack("upstream")
OPTIONS = SquadOptions(model="model", data="data.json")


@dataclass(frozen=True)
class Reader:
    """A file's path in the working folder, a valid content, and the code that reads and uses it."""

    file: str
    valid: Callable[[], bytes]
    read: Callable[[], object]


def run(*words: str) -> None:
    """Run a command as a user does, with a standard output that takes no invalid text."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    err = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
        out.flush()
    if code:
        raise SprError(err.getvalue())


def lines(*rows: object) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def head(path: str) -> FakeHost:
    """A head whose answer to every command is the content of a file."""
    return FakeHost("node0", [("", lambda _: Path(path).read_text("utf-8", errors="replace"))])


# What users name


def read_stacks() -> None:
    run("stacks")
    run("stacks", "--json")
    load_stack("mine")


def valid_lock() -> bytes:
    needed = filter(None, map(parse_requirement, requirements(STACK)))
    # A bounded requirement accepts its lowest version.
    pairs = ((r.name, re.findall(r"[\d.]+", r.text.removeprefix(r.name))[0]) for r in needed)
    return render_lock(
        STACK, [Pinned(name, version, ("a" * 64,)) for name, version in pairs]
    ).encode()


VALID_PROJECT = b"""\
[project]
name = "mine"
version = "1"
requires-python = ">=3.10"
dynamic = []
dependencies = ["einops"]
[project.optional-dependencies]
train = ["mine[more]"]
more = ["tqdm"]
[project.scripts]
mine = "mine:main"
[project.entry-points]
plugins = {a = "mine:a"}
[dependency-groups]
dev = ["pytest", {include-group = "lint"}]
lint = ["ruff"]
[tool.uv]
workspace = {members = ["parts/*"]}
sources = {other = {path = "other"}}
[tool.poetry.dependencies]
tqdm = {version = "1"}
[tool.setuptools.dynamic]
dependencies = {file = ["requirements.txt"]}
"""


def read_python_project() -> None:
    files = read_own_package(Path()).files
    assert all(".." not in Path(each).parts for each in files)
    find_packages("pyproject.toml[train,dev]", Path(), None)


def predict_on_head() -> None:
    rows = asking.make_rows(["Who?"], "Somebody did.")
    asking.OnHead(head("answers.jsonl"), Path("model"), None, print).predict(rows)


def answer_lines() -> None:
    with Path("questions.jsonl").open(encoding="utf-8") as file:
        [*predict._read_lines(file)]


# The home folder

FILES = ClusterFiles(Path("home/spr"))


def read_host_keys() -> None:
    for alias in ("i-1", "i-2"):
        if pinned := pinned_host_keys(FILES.known_hosts, alias):
            check_pinned_keys("node0", alias, pinned, (KEY.public.strip(),), FILES.known_hosts)
    pin_host_keys(FILES.known_hosts, "i-2", [KEY.public.strip()])


def read_ssh_config() -> None:
    remembered_cloud("spr")
    cluster_names()
    cluster_names("local")


def read_event_log() -> None:
    EventLog(FILES.events).record("done", "\udcff")
    run("events")
    run("events", "--json")


EVENT = {"time": "2026-11-21T08:00:00+00:00", "event": "done", "what": "Buy", "resources": ["i-1"]}
CLOUD = StateFolder(Path("home/.local-cloud"))


def valid_snapshot() -> bytes:
    save_snapshot(CLOUD.snapshot, {"us-east-1": [1, "a", None]})
    return CLOUD.snapshot.read_bytes()


# Results


def read_results_folder() -> None:
    read_job_id(Path("out"))
    run("report", "out")
    run("report", "out", "--json", "--price", "1", "--compare", "out")


def read_own_results() -> None:
    read_results_folder()
    done: Any = SimpleNamespace(
        plan=SimpleNamespace(results=Path("out")), record=SimpleNamespace(job="squad-1")
    )
    json.dumps(result := read_results(done))
    render_result(result, Path("out"))


def read_reference() -> None:
    job: Any = SimpleNamespace(
        placement=SUBMITTED.placement,
        nodes=[{"name": "node0"}],
        argv=(),
        seconds=1.0,
    )
    render_result(reference.read_results(Path("out"), PRESETS["distilbert"], STACK, job), Path())


TRIALS = [
    {"best": n == 1, "options": {"seed": n}, "scores": {"f1": 9.5}, "seconds": n} for n in (1, 2)
]
METRIC = {"step": 1, "time": 0.5, "loss": 5.0, "lr": 1e-5, "samples": 8, "tokens": 80, "padded": 96}
LOSSES = {"log_history": [{"step": 1, "loss": 0.5}]}

# On the head

TUNED = TuningResult(
    TuningKey("upstream", "gloo", "auto", False, "scratch", 384, "1 x Xeon"),
    2,
    1,
    8,
    57.5,
    "2026-11-21T08:00:00+00:00",
)
RECORD = replace(
    SUBMITTED, argv=("python", "-m", "worker.tasks", "squad", SquadOptions().to_json())
)
SPEEDS = BenchResult(
    "2026-11-21T08:00:00+00:00",
    "spr",
    *("upstream", "gloo", "bf16", "every CPU has it"),
    1024,
    True,
    tuple(
        NodeSpeed(f"node{n}", f"i-{n}", "r7iz.metal-16xl", "ip", 32, 1.5, 3.0, 90.5, True, "amx")
        for n in range(2)
    ),
    (AllReduce(1 << 20, 0.5, 9, 1.5),),
    "2.13.0",
)


def read_head_tuned() -> None:
    found = read_tuned(head("tuned.json"), TUNED.key)
    if found:
        request = TrainRequest(
            spec_of(SquadOptions()), Path("out"), may_tune=frozenset({"placement", "batch_size"})
        )
        apply_tuned(found, request, 2)


def read_head_record() -> None:
    record = read_record(head("job.json"), JobPaths("squad-1"))
    plan_again(record, ResumeRequest("squad", "squad-1"), 3, "squad-1")


def read_head_speeds() -> None:
    speeds = read_last_speeds(head("speeds.json"), Cluster("spr", (), 0))
    context: Any = SimpleNamespace(
        cloud=SimpleNamespace(has_amx=True, billed=True, region="us-east-1"),
        files=FILES,
    )
    [*render(speeds, context)]
    json.dumps(speeds.as_dict())


class SendingHead(FakeHost):
    """A head whose every file is the one here."""

    def download(self, _: str) -> Iterator[bytes]:
        yield Path("output.tar").read_bytes()


def valid_tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in ("log", "output/results.json", "output/model/config.json"):
            info = tarfile.TarInfo(name)
            info.size = 2
            archive.addfile(info, io.BytesIO(b"{}"))
    return buffer.getvalue()


def list_jobs_of_head() -> None:
    jobs = list_jobs(head("jobs.txt"))
    json.dumps([job.as_dict() for job in jobs])


# On the nodes


def read_metrics_tail() -> None:
    json.dumps(read_tail("rank-0.jsonl", 0.0), allow_nan=False)


def show_figures() -> None:
    render_screen(
        parse_snapshot(Path("figures.json").read_text("utf-8", "replace"), "head"), 80, 24
    )


def read_program_environment() -> None:
    try:
        own = read_words(Path("environment.json"))
    except WorkerError:
        return
    program_environment({"PMI_RANK": "0", "PMI_SIZE": "1"}, "output", own)


READERS = {
    # What users name
    "data": Reader("data.json", SAMPLE.read_bytes, lambda: check_inputs(OPTIONS)),
    "context": Reader("text.txt", lambda: b"Somebody did.", lambda: read_context("text.txt")),
    "stacks": Reader(
        "spr-cluster.toml",
        lambda: (
            b'[stacks.mine]\nbase = "upstream"\nsummary = "x"\npython_packages = ["datasets==4.1.0"]\n'
            b'environment = {A = "b"}\nuse_ipex = false\nindexes = ["https://a"]\nubuntu = "24.04"\n'
        ),
        read_stacks,
    ),
    "pyproject.toml": Reader("pyproject.toml", lambda: VALID_PROJECT, read_python_project),
    "lock": Reader(
        "spr-cluster.locks/upstream.txt",
        valid_lock,
        lambda: read_lock(STACK, Path()),
    ),
    # The home folder
    "known_hosts": Reader(
        "home/spr/known_hosts",
        lambda: f"i-1 {KEY.public}\ni-3 {KEY.public}\n".encode(),
        read_host_keys,
    ),
    "ssh_config": Reader(
        "home/spr/ssh_config", lambda: b"# spr-cluster lives in: local us-east-1\n", read_ssh_config
    ),
    "key": Reader("home/spr/id", KEY.private.encode, lambda: read_public(Path("home/spr/id"))),
    "events": Reader("home/spr/events.jsonl", lambda: lines(EVENT, EVENT), read_event_log),
    "server": Reader(
        "home/.local-cloud/server.json",
        lambda: b'{"pid": 1, "port": 80}',
        lambda: ServerAddress.read(CLOUD),
    ),
    "snapshot": Reader(
        "home/.local-cloud/ec2.pickle", valid_snapshot, lambda: load_snapshot(CLOUD.snapshot)
    ),
    # Results folders
    "job.json": Reader(
        "out/job/job.json",
        lambda: lines(
            {
                "job": "squad-1",
                "cloud": "aws",
                "nodes": [{"type": "r7iz.metal-16xl"}],
                "more": {"cloud": "aws"},
                "command": "spr-cluster train \udcff",
            }
        ),
        read_results_folder,
    ),
    "results.json": Reader(
        "out/results.json",
        lambda: lines(
            make_results(2, loss_curve=[[1, 0.5], [2, 0.25]], trials=TRIALS, metric="f1")
        ),
        read_own_results,
    ),
    "metrics": Reader(
        "out/job/metrics/rank-0.jsonl",
        lambda: lines(METRIC, {**METRIC, "step": 2}),
        read_results_folder,
    ),
    "all_results.json": Reader(
        "out/all_results.json",
        lambda: lines(
            {
                "train_runtime": 5.0,
                "eval_f1": 80.5,
                "eval_exact_match": 70.5,
                "train_samples_per_second": 3.5,
            }
        ),
        read_reference,
    ),
    "trainer_state.json": Reader("out/trainer_state.json", lambda: lines(LOSSES), read_reference),
    "figures": Reader(
        "figures.json", lambda: make_line([make_node(0), make_node(1)]).encode(), show_figures
    ),
    # The head
    "tuned": Reader("tuned.json", lambda: json.dumps([asdict(TUNED)]).encode(), read_head_tuned),
    "record": Reader("job.json", lambda: RECORD.render().encode(), read_head_record),
    "speeds": Reader("speeds.json", lambda: lines(SPEEDS.as_dict()), read_head_speeds),
    "answers": Reader(
        "answers.jsonl", lambda: lines({"text": "a", "score": 0.5, "start": 3}), predict_on_head
    ),
    "archive": Reader(
        "output.tar",
        valid_tar,
        lambda: fetch(
            SendingHead("node0", [("", "at 5")]), JobPaths("squad-1"), Path("fetched"), print
        ),
    ),
    "jobs": Reader(
        "jobs.txt",
        lambda: b"1785508000 - 1 - 0 unfinished step-000007 12 squad-20260731-142501-k3f\n",
        list_jobs_of_head,
    ),
    "facts": Reader(
        "facts.json",
        lambda: facts_answer().encode(),
        lambda: gather_facts(head("facts.json")),
    ),
    "job's output": Reader(
        "log",
        lambda: b'@spr {"event": "step", "step": 1}\n',
        lambda: [parse_event(line) for line in Path("log").read_text(errors="replace").split("\n")],
    ),
    # The nodes
    "questions": Reader(
        "questions.jsonl", lambda: lines({"question": "Who?", "context": "He."}), answer_lines
    ),
    "own metrics": Reader(
        "o.state/metrics/rank-0.jsonl",
        lambda: lines(METRIC),
        lambda: Metrics(Path("o"), 0, print).begin(2),
    ),
    "watched metrics": Reader(
        "rank-0.jsonl", lambda: lines({**METRIC, "seconds": {"data": 0.1}}), read_metrics_tail
    ),
    "environment": Reader("environment.json", lambda: b'["A=b"]', read_program_environment),
}

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1.5, 10**400, 10**18, math.nan, math.inf),
    *("", "x", "\ud800", "\0", "9" * 99),
    *([], {}, [[]], [None], ["x"], [1, 2], {"a": {}}, {"": None}),
)
ODD_TOML = (
    *("1", "-1", "nan", "inf", "true", '"x"', '""', '"\\u0000"', "[]", "{}", "1979-05-27"),
    *('[[["x"]]]', "{a.b.c = 1}", "[1, 2]", '["x"]', "9" * 5000),
    *('"\\u001b"', '["/etc/*"]', '["**x"]'),
)
ODD_BYTES = (
    *(b"\0", b"\xff", b"\xed\xa0\x80", b"\x1b[31m", b"\n", b"\r", b"\x85"),
    *(b"\xe2\x80\xa8", b"{", b"]"),
    *(b'"', b"#", b" ", b"=", b"\xef\xbb\xbf", b"9" * 5000, b"\\ud800", b"NaN", b"x" * 70_000),
)
FIXED = {
    "nothing": b"",
    "spaces": b" \n\t\n",
    "a deep JSON list": b"[" * DEEP,
    "a closed deep JSON list": b"[" * DEEP + b"]" * DEEP,
    "a JSON object of moderate depth": b'{"a":' * 900 + b"1" + b"}" * 900,
    "a deep JSON object": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "a deep TOML array": b"a = " + b"[" * DEEP + b"]" * DEEP,
    "a deep TOML key": b"[stacks.mine.environment" + b".a" * DEEP + b"]\nb = 1\n",
    "an integer of many digits": b"1" * 50_000,
    "a long line": b"x" * 2_000_000,
    "NUL bytes": b"\0" * 50_000,
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "half a surrogate pair": b'{"event": "\\ud800", "time": "\\ud800", "what": "\\ud800"}',
}


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to every value in a document."""
    yield path
    below = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree if isinstance(tree, list) else ())
    )
    for key, value in below:
        yield from places(value, (*path, key))


def misshapen(text: str, number: int) -> str:
    """A JSON document with one value of another shape, or without one key."""
    tree, chance = json.loads(text), random.Random(number)
    path = chance.choice([*places(tree)])
    if not path:
        return json.dumps(chance.choice(ODD_VALUES))
    *above, last = path
    owner = tree
    for key in above:
        owner = owner[key]
    if chance.random() < 0.2:
        del owner[last]
    else:
        owner[last] = chance.choice(ODD_VALUES)
    return json.dumps(tree)


def damaged(valid: bytes, number: int) -> bytes:
    """A file with a defect: cut, with odd bytes, or with a value of another shape."""
    chance = random.Random(number)
    text = valid.decode("utf-8", "replace")
    where = chance.randrange(len(valid) + 1)
    kind = chance.randrange(6)
    if kind == 0:
        return valid[:where]
    if kind == 1:
        return valid[:where] + chance.choice(ODD_BYTES) + valid[where:]
    if kind == 2:
        return valid[:where] + chance.randbytes(8) + valid[where + 8 :]
    with contextlib.suppress(ValueError):
        return misshapen(text, number).encode()
    rows = text.split("\n")
    row = chance.randrange(len(rows))
    with contextlib.suppress(ValueError):
        rows[row] = misshapen(rows[row], number)
        return "\n".join(rows).encode()
    rows[row] = re.sub(r"= .*", lambda _: f"= {chance.choice(ODD_TOML)}", rows[row])
    words = rows[row].split(" ")
    if "=" not in words:
        words[chance.randrange(len(words))] = chance.choice(("", "x", "é", "-1", "9" * 30, "\0"))
    rows[row] = " ".join(words)
    return "\n".join(rows).encode()


@pytest.fixture(scope="module", autouse=True)
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("bytes")
        patch.chdir(folder)
        for name in ("home/.local-cloud", "out/metrics", "model"):
            Path(name).mkdir(parents=True)
        CLOUD.root.chmod(0o700)
        for name in ("config.json", "tokenizer.json"):
            Path("model", name).write_text("{}")
        yield folder


@pytest.fixture(params=READERS.values(), ids=[*READERS])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Reader:
    monkeypatch.setenv("SPR_CLUSTER_HOME", "home")
    found: Reader = request.param
    Path(found.file).parent.mkdir(parents=True, exist_ok=True)
    # A results folder with nothing but a damaged file is refused as a whole.
    Path("out/results.json").write_bytes(READERS["results.json"].valid())
    Path("out/all_results.json").write_bytes(READERS["all_results.json"].valid())
    return found


def read_bytes(reader: Reader, content: bytes) -> None:
    path = Path(reader.file)
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    with contextlib.suppress(SprError, WorkerError):
        reader.read()


def test_a_valid_file_is_read(reader: Reader) -> None:
    Path(reader.file).write_bytes(reader.valid())
    reader.read()


def test_a_hostile_file_is_understood(reader: Reader) -> None:
    for content in FIXED.values():
        read_bytes(reader, content)


def test_any_bytes_are_a_value_or_a_clear_error(reader: Reader) -> None:
    valid = reader.valid()

    @settings(max_examples=25)
    @given(
        st.one_of(st.binary(max_size=200), st.integers(0, 2**32).map(lambda n: damaged(valid, n)))
    )
    def check(content: bytes) -> None:
        read_bytes(reader, content)

    check()
