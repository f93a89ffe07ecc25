"""``spr-cluster.toml``: what it sets, and one line for each mistake in it. No cloud is asked."""

from __future__ import annotations

import io
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from cluster.console.options import Option, opposite
from infra.errors import UsageError
from infra.files import parse_toml
from infra.project_file import ProjectFile, read_project_file
from infra.spec import OPTIONS, ClusterOptions
from jobs.__main__ import main
from jobs.cli import COMMANDS, build_parser
from jobs.cli.setup.config import build_schema, describe_settings, render_new
from jobs.cli.shared.project_options import all_options, apply_project
from tests.jobs.cli.transcript import check_transcript
from tests.jobs.context import parse_request

FILE = """\
[cluster]
name = "bert"
nodes = 2
cloud = "aws"
region = "eu-west-1"
instance-type = ["c7i.metal-24xl", "m7i.metal-24xl"]
allow-no-amx = true
no-placement-group = false

[jobs.finetune]
task = "squad"
epochs = 3
demo = true

[jobs.mine]
command = "python train.py --name 'a b'"
files = ["a.py", "b.py"]
ppn = 2
[jobs.mine.env]
SEED = "7"
HF_TOKEN = "$HF_TOKEN"
PRICE = "$$5"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPR_CLUSTER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    return tmp_path


def parse(text: str) -> ProjectFile:
    Path("spr-cluster.toml").write_text(text)
    return read_project_file()


def test_the_file_gives_options_and_the_command_line_wins() -> None:
    def answer(asked: str) -> str:
        return shlex.join(apply_project(shlex.split(asked[2:]), parse(FILE)).words)

    check_transcript(Path(__file__).parent / "golden/project_words.txt", answer)


def test_quoted_operators_are_arguments_and_outputs_may_be_none() -> None:
    command = """find '|' ">" \\;"""
    project = parse(f"[jobs.mine]\ncommand = '''{command}'''\noutputs = []\n")
    words = apply_project(["run", "mine"], project).words
    assert "--outputs=" in words
    assert words[-4:] == ["find", "|", ">", ";"]


@pytest.mark.parametrize(
    ("table", "typed", "place"),
    [
        ("", "", "--name=a --cloud=aws --region=eu-west-1"),
        ('name = "b"', "", "--name=b"),
        ('name = "b"', "--name a", "--cloud=aws --region=eu-west-1 --name a"),
        ('cloud = "local"', "", "--name=a --cloud=local"),
    ],
)
def test_a_job_on_another_cluster_gets_nothing_of_the_usual_place(
    table: str, typed: str, place: str
) -> None:
    cluster = '[cluster]\nname = "a"\ncloud = "aws"\nregion = "eu-west-1"\n'
    text = f'{cluster}[jobs.x]\ntask = "squad"\n{table}\n'
    found = apply_project(["train", "x", *typed.split()], parse(text)).words
    assert " ".join(found[2:]) == place


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("run --nodes 1 finetun", "no job 'finetun'; did you mean finetune"),
        ("train --nodes 1 finetun", "no job 'finetun'; did you mean finetune.*tasks are squad,"),
        ("train sqaud", "no job 'sqaud'; did you mean squad"),
        ("train other --seed 1", "no job 'other'; it has finetune, mine"),
        (
            "run mine --ppn 1 more -- a",
            "unknown argument 'more' of .*: spr-cluster run mine -- more",
        ),
        ("run mine --nodez 4", "unknown option '--nodez'; did you mean --nodes"),
    ],
)
def test_a_misplaced_or_mistyped_word_is_found_behind_options(words: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        apply_project(words.split(), parse(FILE))
    assert re.search(said, str(caught.value), re.DOTALL)


BLAMED = """\
[cluster]
nodes = 4
market = "on-demand"
[jobs.mine]
command = "python train.py"
data-dir = "good"
ppn = 2
"""


@pytest.mark.parametrize(
    ("words", "place", "given"),
    [
        ((), "", {"private": False, "placement_group": True, "second_guard": True}),
        (
            ("--private", "--no-placement-group", "--no-second-guard"),
            "flag",
            {"private": True, "placement_group": False, "second_guard": False},
        ),
    ],
)
def test_a_switch_of_the_cluster_is_cleared_by_value(
    words: tuple[str, ...], place: str, given: dict[str, bool]
) -> None:
    file = "[cluster]\nprivate = false\nno-placement-group = false\nsecond-guard = true\n"
    found = apply_project(["up", *words], parse(file)).words

    assert build_parser("up").parse(found)[1].given == given
    rows = {row.key: row for row in describe_settings(["up", *words], parse(file))}
    for at, key in enumerate(("private", "placement_group", "second_guard"), 2):
        name = key.replace("_", "-").replace("placement", "no-placement")
        value = given[key] is not name.startswith("no-")
        assert (rows[name].value, rows[name].origin) == (value, place or f"spr-cluster.toml:{at}")


def test_the_last_of_a_switch_and_its_opposite_wins() -> None:
    def is_detached(words: str) -> bool:
        return bool(parse_request(*words.split()).detach)

    assert not is_detached("run --detach --no-detach a")
    assert is_detached("run --detach --no-detach --detach a")
    assert not is_detached("run --no-detach -- a --detach")
    assert parse_request("run", "--", "a", "--no-detach").program[1:]
    with pytest.raises(UsageError, match="unknown option '--no-ppn'"):
        is_detached("run --no-ppn a")
    ssh = parse_request("ssh", "node1", "a", "--no-json", "--no-help")
    assert ssh.command == ("a", "--no-json", "--no-help")


def test_no_option_is_the_opposite_of_another() -> None:
    for command in COMMANDS:
        options = [*all_options(build_parser(command))]
        known = {flag for each in options for flag in each.flags}
        off = {opposite(flag) for each in options if each.is_switch for flag in each.flags}
        assert not off & known


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("run mine --data bad", "--data-dir bad: no such folder"),
        ("run mine --data-dir=bad", "--data-dir bad: no such folder"),
        ("run mine --ppn 0", "argument --ppn: '0': expected"),
        ("up --nodes 2 --max-price 3", "--max-price requires --market spot"),
        ("up 4", "unknown argument '4'"),
    ],
)
def test_what_is_typed_is_not_blamed_on_the_file(
    typed: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "good").mkdir()
    (folder / "train.py").touch()
    parse(BLAMED)
    assert main(typed.split()) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"spr-cluster: {said}"), err


def test_a_typed_value_replaces_the_files_unless_the_option_repeats(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = apply_project(["run", "mine", "--ppn=1", "--env=A=1"], parse(FILE)).words
    assert {"--env=SEED=7", "--env=A=1", "--ppn=1"} < {*found}
    assert "--ppn=2" not in found
    project = parse('[cluster]\nnodes = "x"\nname = "bert"\n')
    assert apply_project(["up", "--nodes=2"], project).words == ["up", "--name=bert", "--nodes=2"]
    assert main(["up"]) == 2
    assert "spr-cluster.toml:2: nodes: argument --nodes: invalid" in capsys.readouterr().err


def test_a_message_about_both_names_the_place_in_the_file(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parse(BLAMED)
    assert main(["up", "--max-price", "3"]) == 2
    assert "market spot; on-demand prices are fixed (spr-cluster.toml:3 sets market)" in (
        capsys.readouterr().err
    )


def test_not_every_message_about_the_cluster_is_blamed_on_its_name() -> None:
    project = parse('[cluster]\nname = "ub"\nregion = "us-eas-1"\n')
    explain = apply_project(["status"], project).explain
    used = "another spr-cluster command is using cluster 'ub'"
    assert explain(used) == used
    assert explain("unknown region 'us-eas-1'").startswith("spr-cluster.toml:3: region: unknown")


def test_config_names_the_origin_of_each_value(capsys: pytest.CaptureFixture[str]) -> None:
    parse(FILE)
    assert main(["config", "--json", "up", "--nodes", "8"]) == 0
    rows = {row["key"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["nodes"] == {"key": "nodes", "value": 8, "origin": "flag"}
    assert rows["name"] == {"key": "name", "value": "bert", "origin": "spr-cluster.toml:2"}
    assert rows["ttl"] == {"key": "ttl", "value": "8h", "origin": "default"}
    assert rows["bake"]["value"] is None, "it depends on the cloud and the number of nodes"
    assert main(["config", "doctor", "--nodes", "8", "--json"]) == 0
    assert {row["key"]: row for row in json.loads(capsys.readouterr().out)}["nodes"] == rows[
        "nodes"
    ]
    assert main(["config", "ssh", "--json"]) == 0
    assert rows["name"] in json.loads(capsys.readouterr().out)
    assert main(["config", "run", "mine", "--env", "TOKEN_X=hf_x"]) == 0
    assert "hf_x" not in capsys.readouterr().out
    assert main(["config"]) == 0
    shown = capsys.readouterr().out
    assert "hf_x" not in shown
    assert [line.split() for line in shown.splitlines() if "jobs.mine.env" in line] == [
        ["jobs.mine.env", "SEED,", "HF_TOKEN,", "PRICE", "spr-cluster.toml:19"]
    ]


def test_config_says_that_a_command_has_no_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "local", "status"]) == 0
    text = "`local` has no options that spr-cluster.toml could set.\n"
    assert capsys.readouterr().out == text


def test_config_shows_every_job_also_beside_one_whose_variable_is_not_set(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parse(
        '[jobs.a]\ncommand = "x"\nenv = ["UNSET_1"]\n[jobs.b]\ntask = "squad"\nepochs = 3\n'
        '[jobs.c]\ncommand = "y"\n[jobs.d]\ncommand = "z"\nenv = ["UNSET_2"]\n'
    )
    assert main(["config"]) == 2
    shown = capsys.readouterr()
    rows = [line.split() for line in shown.out.splitlines() if line.startswith("jobs.")]
    assert rows == [
        ["jobs.b.task", '"squad"', "spr-cluster.toml:5"],
        ["jobs.b.epochs", "3", "spr-cluster.toml:6"],
        ["jobs.c.command", '"y"', "spr-cluster.toml:8"],
    ]
    assert "UNSET_1" in shown.err
    assert "UNSET_2" in shown.err


def test_a_project_is_found_from_a_folder_below(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse(
        '[jobs.a]\ntask = "classify"\ndata = "data/x.json"\neval = "s3://b/x.json"\n'
        'model = "./m"\nteacher = "data"\nresults = "~/out"\ntoken-cache = "none"\n'
        'class-weights = "balanced"\nenv = ["A", "@.env", "@a=b"]\n'
        '[jobs.b]\ncommand = "x"\nfiles = "a"\ndata-dir = ["d", "s3://b/c"]\narray = "x.csv:3,17"\n'
        'output-dir = "out"\npackages = "pyproject.toml[train]"\n[jobs.c]\ncommand = "x"\n'
        'array = "1-9"\nfolder = "none"\n'
        '[jobs.d]\ncommand = "x"\nfolder = "../other"\npackages = "b.txt"\n'
        '[jobs.e]\ncommand = "x"\npackages = "[train]"\n[jobs.f]\ncommand = "x"\npackages = "/"\n'
    )
    (folder / "data").mkdir()
    (folder / "data" / "x.json").touch()
    (folder / "src").mkdir()
    (folder / "pyproject.toml").touch()
    monkeypatch.chdir(folder / "src")
    monkeypatch.setenv("HOME", "/home/me")

    def words(job: str) -> str:
        found = apply_project(["run", job], read_project_file()).words
        return shlex.join(found).replace(str(folder), "HERE")

    assert words("a") == (
        "train classify --data=HERE/data/x.json --eval=s3://b/x.json --model=HERE/m "
        "--teacher=HERE/data --results=/home/me/out --token-cache=none --class-weights=balanced "
        "--env=A --env=@HERE/.env --env=@HERE/a=b"
    )
    assert words("b") == (
        "run --folder=HERE --files=HERE/a --data-dir=HERE/d --data-dir=s3://b/c "
        "--array=HERE/x.csv:3,17 --output-dir=out '--packages=HERE/pyproject.toml[train]' -- x"
    )
    assert words("c") == "run --folder=none --array=1-9 -- x"
    assert words("d") == "run --folder=HERE/../other --packages=b.txt -- x"
    assert words("e") == "run --folder=HERE '--packages=[train]' -- x"
    assert words("f") == "run --folder=HERE --packages=/ -- x"


def test_the_schema_accepts_what_the_parsers_accept() -> None:
    schema = build_schema()
    jsonschema.Draft7Validator.check_schema(schema)
    validator = jsonschema.Draft7Validator(schema)
    validator.validate(parse_toml(f'{FILE}[cluster.tags]\nteam = "nlp"\n', "x"))
    validator.validate(parse_toml(render_new("a-b", "local", "2", "1h", 'say "hi"'), "x"))
    for broken in (
        "[clusters]",
        "[cluster]\nnode = 1",
        '[cluster]\nnodes = "2"',
        '[jobs.a]\ntask = "x"',
    ):
        with pytest.raises(jsonschema.ValidationError):
            validator.validate(parse_toml(broken, "x"))


def test_each_answer_for_a_new_file_is_checked_before_the_next_question(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("jobs.cli.setup.config.has_terminal", lambda: True)

    def answer(*answers: str) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{text}\n" for text in answers)))
        main(["config", "--init"])
        return capsys.readouterr().err.partition("] ")[2]

    assert answer("Bert!").startswith("spr-cluster: --name Bert!: expected at most 32")
    assert "] spr-cluster: --cloud azure: expected aws or local" in answer("bert", "azure")
    assert "] spr-cluster: --nodes 0: expected a whole number" in answer("bert", "local", "0")
    assert "] spr-cluster: --nodes two: expected a whole number" in answer("bert", "local", "two")
    assert answer("bert", "local", "3", "", "").startswith("Which cloud, aws or local")
    file = read_project_file()
    given = {"name": "bert", "cloud": "local", "nodes": 3, "idle-timeout": "1h"}
    assert file.table("cluster") == given
    words = f"run --name=bert --cloud=local --folder={folder} -- python train.py"
    assert shlex.join(apply_project(["run", "train"], file).words) == words


def test_a_mistake_in_the_file_is_one_line_with_its_place(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    def answer(text: str) -> str:
        Path("spr-cluster.toml").write_text(f"{text}\n")
        before = sorted(folder.rglob("*"))
        try:
            code: Any = main(["config"])
        except SystemExit as exit_:
            code = exit_.code
        err = capsys.readouterr().err
        assert code == 2, (text, err)
        assert err.count("spr-cluster: ") == 1
        assert sorted(folder.rglob("*")) == before
        return err.removeprefix("spr-cluster: ").rstrip("\n")

    check_transcript(Path(__file__).parent / "golden/project_file.txt", answer)


# What an option's help says if it takes several values in one word.
_SAYS_SEVERAL = re.compile(r"a,b,c|separated by commas|ranges|A/x,s3://C")


def test_what_takes_several_values_takes_a_list() -> None:
    options = {each.flags[0]: each for name in ("up", "train", "run") for each in _flags_of(name)}
    joined = {flag for flag, each in options.items() if each.is_list and not each.repeats}
    assert joined == {flag for flag, each in options.items() if _SAYS_SEVERAL.search(each.help)}
    fields = {key for key, each in ClusterOptions.model_fields.items() if each.default == ()}
    assert {OPTIONS[key].flag for key in fields} <= joined | {"--tag"}
    text = '[cluster]\nnodes = 2\n[jobs.a]\ntask = "squad"\nreport-to = ["p", "q"]\nenv = ["A=1", "B=2"]\n'
    assert apply_project(["train", "a"], parse(text)).words[2:] == [
        *("--report-to=p,q", "--env=A=1", "--env=B=2")
    ]


def _flags_of(command: str) -> Iterator[Option]:
    found = all_options(build_parser(command).children[command])
    return (each for each in found if each.flags and not each.is_switch)
