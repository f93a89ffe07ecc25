"""Prompts with completions, and chats: rows that `train lm` refuses, each in one line with a fix."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import chat_template_utils

from infra.errors import UsageError
from jobs.train.request import check_inputs
from jobs.worker.data.readers import read_table
from jobs.worker.data.records import SKIP_HINT
from jobs.worker.runtime.errors import DatasetError
from jobs.worker.tasks.lm.chats import Exchange, find_columns, read_exchange, read_turns
from jobs.worker.tasks.lm.generate import encode_prompt
from jobs.worker.tasks.lm.model import LmOptions
from jobs.worker.tasks.lm.task import Lm
from jobs.worker.tasks.lm.templates import Renderer, note_dropped
from jobs.worker.training.task import Loaded
from jobs.worker.training.text_task import Row
from tests.jobs.context import parse_request
from tests.jobs.worker.tasks.chat_models import CHATML, new_chat_tokenizer

USER, ANSWER = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}
SYSTEM, TOOL = {"role": "system", "content": "Be brief."}, {"role": "tool", "content": "5"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
PAIR, CHAT = {"prompt": "a", "completion": "b"}, {"messages": [USER, ANSWER]}
TURNS = {"prompt": [USER], "completion": [ANSWER]}
PARTS, UNWEIGHTED = [{"type": "text", "text": "a"}], {**ANSWER, "weight": 0}
OWN_TEMPLATE = "--chat-template t.jinja"


def chat(*turns: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [*turns], **more}


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


ROWS: list[tuple[Any, Any, str, str]] = [
    (PAIR, {"prompt": "a"}, "has no 'completion'", "add it"),
    (PAIR, {**PAIR, "completion": [ANSWER]}, "a text, and 'completion' is a list of turns", "both"),
    (PAIR, TURNS, "prompt and completion are lists of turns, and in other rows texts", "same"),
    (TURNS, {**TURNS, "prompt": []}, "column 'prompt' has no turns", "leave out the row"),
    (TURNS, {**TURNS, "completion": [USER]}, "begins with the role 'user'", "end the prompt"),
    (TURNS, {**TURNS, "prompt": [USER, ANSWER]}, "turn 3 is one of 'assistant' after", "join"),
    (CHAT, {"messages": None}, "has no 'messages'", "add it"),
    (CHAT, {"messages": "Why?"}, "column 'messages' is not a list of turns", '"role": "user"'),
    (CHAT, chat(USER), "has no turn of the assistant", "add the answer"),
    (CHAT, chat(USER, UNWEIGHTED), "has no turn of the assistant that", "leave out"),
    (CHAT, chat(USER, {**ANSWER, "weight": 0.5}), "turn 2 has the weight '0.5'", "give 0 to answ"),
    (CHAT, chat(USER, UNWEIGHTED, USER, ANSWER), "weight 0, and --train-on all", "remove the weight"),
    (TURNS, {**TURNS, "completion": [UNWEIGHTED]}, "learned as a whole", "messages"),
    (CHAT, chat(USER, said("bot", "So.")), "turn 2 has the role 'bot'", "roles are system, us"),
    (CHAT, chat({"from": "human", "value": "a"}), "turn 1 has no role and content", '"content"'),
    (CHAT, chat(USER, USER, ANSWER), "turn 2 is one of 'user' after one of 'user'", "join"),
    (CHAT, chat(ANSWER, USER), "turn 1 is one of 'assistant' at the beginning", "system or us"),
    (CHAT, chat(USER, TOOL, ANSWER), "turn 2 is one of 'tool' after one of 'user'", "assistant"),
    (CHAT, chat(USER, CALL, TOOL, USER), "turn 4 is one of 'user' after one of 'to", "tool or"),
    (CHAT, chat(said("user", " "), ANSWER), "turn 1: the content is empty", SKIP_HINT),
    (CHAT, chat(said("user", PARTS), ANSWER), "turn 1: the content is a list of parts", "join"),
    (CHAT, chat(USER, said("assistant", "\udfff")), "turn 2: the content contains half of a", SKIP_HINT),
    (CHAT, chat(USER, ANSWER, tools={"a": 1}), "column 'tools' is not a list of tools", SKIP_HINT),
    (CHAT, chat(USER, ANSWER, tools="[{"), "column 'tools' is not a list of tools", SKIP_HINT),
    ({"text": "a"}, {"text": " "}, "column 'text' is empty", SKIP_HINT),
    ({"text": "a"}, {"text": [USER]}, "column 'text' is a list, not a text", "'messages'"),
]  # fmt: skip
"""A good row, a bad one after it, what is said of it after the file and the line, and the fix."""


def check(path: Path, options: str) -> None:
    words = ["--data", str(path), "--model", "scratch", *options.split()]
    check_inputs(parse_request("train", "lm", *words).read_options())


def refuse(path: Path, options: str) -> UsageError:
    with pytest.raises(UsageError) as refused:
        check(path, options)
    assert "\n" not in refused.value.message + (refused.value.hint or "")
    return refused.value


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_model(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.jinja").write_text(CHATML)


@pytest.mark.parametrize(("good", "bad", "text", "fix"), ROWS, ids=[each[2] for each in ROWS])
def test_a_bad_row_is_named_with_its_fix(good: Any, bad: Any, text: str, fix: str) -> None:
    path = write(Path("a.jsonl"), good, bad, good)
    options = f"{OWN_TEMPLATE} {'--train-on all' * ('--train-on all' in text)}"
    refused = refuse(path, options)
    assert refused.message.startswith("a.jsonl: line 2: ")
    assert text in refused.message
    assert fix in str(refused.hint)
    # Without the row, nothing is wrong.
    check(path, f"{options} --skip-bad-records")


@pytest.mark.parametrize(
    ("content", "options", "text", "fix"),
    [
        ("prompt\na\n", "", "a column 'prompt' and no 'completion'", "--text-column"),
        ("instruction,output\na,b\n", "", "It has instruction, output", "'prompt' and 'compl"),
        ("prompt,chosen\na,b\n", "", "It has prompt, chosen", "only the chosen answers; or name"),
        ('messages\n"[]"\n', "", "line 2: column 'messages' is not a list", "JSON lines"),
        ({**PAIR, **CHAT}, "", "chats, in 'messages', and also", "--text-column mess"),
        (CHAT, "", "of scratch has no chat template", "--chat-template FILE"),
        (TURNS, "--model ./m", "of ./m has no chat template", "--chat-template FILE"),
        (CHAT, "--model ./none", "./none: not a model folder", "save_pretrained"),
        (CHAT, "--chat-template no.jinja", "no.jinja", ""),
        (CHAT, "--chat-template bad.jinja", "line 2: is no Jinja template", "copy one"),
        (CHAT, "--chat-template latin.jinja", "latin.jinja: is not UTF-8", "UTF-8"),
        (CHAT, "--chat-template none.jinja", "does not use 'messages'", "copy one"),
    ],
)
def test_a_bad_file_is_named_with_its_fix(content: Any, options: str, text: str, fix: str) -> None:
    Path("bad.jinja").write_text("{% for message in messages %}\n{{ message.content }\n")
    Path("latin.jinja").write_bytes("{{ messages }} é".encode("latin-1"))
    Path("none.jinja").write_text("Hello!")
    Path("none").mkdir()
    write_model(Path("m"))
    path = Path("a.csv" if isinstance(content, str) else "a.jsonl")
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    refused = refuse(path, options)
    assert text in refused.message
    assert fix in str(refused.hint)


def test_a_jobs_results_are_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(model := Path("results/lm-1/model"))
    (model / "chat_template.jinja").write_text(CHATML)
    words = ["--data", str(write(Path("a.jsonl"), CHAT)), "--model", "results/lm-1"]
    options = parse_request("train", "lm", *words).read_options()
    assert options.model_name == str(model)
    check_inputs(options)
    # Another version of transformers than the nodes' renders prompts itself.
    monkeypatch.delattr(chat_template_utils, "render_jinja_template")
    prompt = encode_prompt(Loaded(None, new_chat_tokenizer(["Why?"])), Row("row 1", chat(USER)))
    assert len(prompt) > 9


@pytest.mark.parametrize(
    "row",
    [
        chat(SYSTEM, USER, ANSWER, USER, ANSWER),
        chat(USER, CALL, TOOL, TOOL, ANSWER, USER, tools='[{"name": "add"}]'),
        {"conversations": [USER, ANSWER]},
        {"text": "a", **CHAT},
        PAIR,
        {"system": "linux", **PAIR},
        {"system": "Be brief.", **chat(SYSTEM, USER, ANSWER)},
        {**TURNS, "prompt": [SYSTEM, USER]},
        chat({**USER, "weight": 0.5}, ANSWER),
    ],
)
def test_good_rows_are_exchanges(row: dict[str, Any]) -> None:
    path = write(Path("a.jsonl"), row)
    options = LmOptions(data=str(path), chat_template="t.jinja")
    Lm(options).check()
    notes = list[str]()
    (found,) = Lm(options).read(notes.append).train
    if "completion" in row:
        assert notes[0] == "a.jsonl: texts from column 'prompt', completions from 'completion'"
    assert [each for each in notes[1:] if "'system' is not read" in each] == notes[1:]
    assert len(notes) == 1 + ("system" in row)
    assert isinstance(found, Exchange)
    assert found.place == "a.jsonl: line 1"


def test_columns_that_predict_needs(tmp_path: Path) -> None:
    def columns(row: Any, asked: str | None = None) -> dict[str, str]:
        options = LmOptions(data=str(write(tmp_path / "a.jsonl", row)), text_column=asked)
        return dict(Lm(options).read(lambda _: None).columns)

    assert columns(PAIR) == {"prompt": "prompt"}
    assert columns({"conversations": [USER, ANSWER]}) == {"messages": "conversations"}
    assert columns({"content": "a", "id": 1}) == {"text": "content"}
    assert columns({"code": "a", "text": "b"}, "code") == {"text": "code"}
    assert columns({**PAIR, **CHAT}, "messages") == {"messages": "messages"}
    assert columns({**PAIR, **CHAT}, "prompt") == {"text": "prompt"}
    spaced = write(tmp_path / "a.jsonl", {" prompt": "a", "completion ": "b"})
    assert find_columns(read_table(str(spaced)), None) == [" prompt", "completion "]


SAYS = "{% for m in messages %}%s{% endfor %}"
UNSTABLE = SAYS.replace("%s", "{{ m.content }}{% if loop.last %}!{% endif %}")
UNSAID = SAYS.replace("%s", "{{ m.content }}{% generation %}{% endgeneration %}")
NO_SYSTEM = SAYS.replace("%s", "{% if m.role != 'system' %}{{ m.content }}{% endif %}")
NO_MORE = "{{ messages[0].content + messages[1].content + messages[2].content }}"
HALVES = SAYS.replace("%s", "{% generation %}{{ m.content }}{% endgeneration %}")
NO_TOOL = SAYS.replace("%s", "{% if m.role != 'tool' %}{{ m.tool_calls or m.content }}{% endif %}")
CALL_BY_NAME = "m.tool_calls and {'add': '+'}[m.tool_calls[0].function.name]"
NO_TOOL_BY_NAME = NO_TOOL.replace("m.tool_calls", CALL_BY_NAME)
CALLS = (USER, {**CALL, "content": ""}, TOOL, ANSWER)
ADDS = [{"function": {"name": "add"}} for _ in range(2)]
TWICE = (USER, {**CALL, "tool_calls": ADDS, "content": ""}, TOOL, ANSWER)
PARTIAL = (  # also of tools that are named elsewhere
    "{{ m.tool_calls[0].function.name if m.tool_calls else m.content }}",
    "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.arguments }}{% endfor %}",
    "{% if m.role == 'tool' %}add: {% endif %}{{ m.content }}",
)
NAMED = (USER, {**CALL, "content": "I add."}, TOOL, ANSWER)
THOUGHT = (USER, {**CALL, "content": "", "thinking": "Let me add."}, TOOL, ANSWER)
AS_TEXT = (USER, {**CALL, "content": "", "tool_calls": json.dumps(ADDS)}, TOOL, ANSWER)
AS_OBJECT = (USER, {**CALL, "content": "", "tool_calls": ADDS[0]}, TOOL, ANSWER)
NAMELESS = (USER, {**CALL, "content": "", "tool_calls": ["add"]}, TOOL, ANSWER)
THINKS = SAYS.replace("%s", "{{ m.thinking }}{{ m.content }}")
DROPPED = (CALLS, NAMED, THOUGHT, AS_TEXT, AS_OBJECT, NAMELESS)
HALF = (USER, {**ANSWER, "thinking": "\ud83d"})
TWO, SAME = (USER, ANSWER), (USER, ANSWER, said("user", "Oh."), ANSWER)


@pytest.mark.parametrize(
    ("template", "turns", "text", "fix"),
    [
        ("{{ raise_exception('No!') }}", TWO, "the chat template fails: No!", "correct the row"),
        ("{{ messages[0].name.first }}", TWO, "the chat template fails: ", "another"),
        (NO_SYSTEM, (SYSTEM, *TWO), "drops turn 1 (system): 'Be brief.'", "remove the turn"),
        (NO_MORE, SAME, "drops turn 4 (assistant): 'So.'", "remove the turn"),
        *((THINKS, turns, "drops the calls of tools", "row") for turns in DROPPED),
        *((SAYS.replace("%s", each), TWICE, "drops the calls of", "the row") for each in PARTIAL),
        (NO_TOOL, CALLS, "drops turn 3 (tool): '5'", "remove the turn"),
        (NO_TOOL_BY_NAME, CALLS, "drops turn 3 (tool): '5'", "remove the turn"),
        (UNSTABLE, TWO * 2, "writes turn 1 differently if others follow", '"weight": 0'),
        (HALVES, (USER, UNWEIGHTED, *TWO), "marks 4 parts of 2 answers, so", "each answer as"),
        (THINKS, HALF, "the chat contains half of a surrogate pair", ""),
        (UNSAID, TWO, "marks no words of the assistant", "{% generation %}"),
    ],
)
def test_a_template_that_does_not_fit_a_row(template: str, turns: Any, text: str, fix: str) -> None:
    """Also if the last words, which it drops, are those of an earlier answer."""
    tokenizer = new_chat_tokenizer(["Why? So."], template)
    with pytest.raises(DatasetError) as refused:
        Renderer(tokenizer, learn_all=False)(Exchange("a.jsonl: line 7", (), turns))
    assert refused.value.message.startswith("a.jsonl: line 7: ")
    assert text in refused.value.message
    assert fix in str(refused.value.hint)
    assert "\n" not in f"{refused.value.message} {refused.value.hint}"


LATE = (  # as Gemma 4's
    "{% if not m.tool_calls %}{{ m.content }}{% endif %}"
    "{% if m.role == 'tool' %}{{ messages[loop.index0 - 1].content }}{% endif %}"
)


@pytest.mark.parametrize("tool", [{"name": "add"}, {"type": "code"}])
@pytest.mark.parametrize("says", ["{{ m.content }}", "{{ m.content | tojson }}", LATE])
def test_tools_and_reasoning_that_a_template_drops_are_noted(says: str, tool: Any) -> None:
    """Of reasoning, only that of the last answer counts: Qwen3's template, for one, drops the others."""
    says = f"{{% generation %}}{says}{{% endgeneration %}}"
    thinks = says + "{% if loop.last %}{{ m.reasoning_content }}{% endif %}"
    quote = '"It\'s 5.\n"'
    called = {**CALL, "content": "So.", "reasoning_content": "So?"}
    turns = [USER, called, said("tool", quote), ANSWER]
    thought = [*turns[:3], {**ANSWER, "reasoning_content": "Aha."}]
    calls, notes = "{{ m.tool_calls }}", list[str]()
    for more, ends, known in (
        (says, thought, ["tools", "thoughts"]),
        ("{{ tools }}" + thinks, thought, []),
        (thinks, turns, ["tools"]),
        (says, [*turns[:3], {**ANSWER, "reasoning": ""}], ["tools"]),
        (says, [*turns[:3], {**ANSWER, "reasoning": "So"}], ["tools"]),  # is in the content
    ):
        tokenizer = new_chat_tokenizer(["Why? So."], SAYS.replace("%s", more + calls))
        row = read_exchange("row 1", chat(*ends, tools=[tool]), ["messages"])
        text = Renderer(tokenizer, learn_all=True)(row)
        assert [*text.dropped] == known
        note_dropped([text, text], notes.append)
    assert ["tools of 2 rows" in each for each in notes] == [True, False, True, True, True]
    assert "the reasoning of 2 last answers: put it into the content" in notes[1]


@pytest.mark.parametrize(
    ("call", "dropped"),
    [
        ("{{ m.tool_calls or m.content }}", ["words"]),
        ("{{ m.content }}{{ m.tool_calls }}", []),
        ("{{ m.content }}{{ m.tool_calls | upper }}", []),
        ("{{ m.content }}{% if m.tool_calls[0].function.name == 'add' %}add{% endif %}", "calls"),
        ("{{ m.content }}{{ {'add': 'plus'}[m.tool_calls[0].function.name] + '' }}", []),
    ],
)
def test_words_beside_calls_that_a_template_drops_are_noted(call: str, dropped: Any) -> None:
    """As Llama 3.1's drops them. Of a template that fails for other names, nothing is said."""
    call = f"{{% if m.tool_calls %}}{call}{{% else %}}{{{{ m.content }}}}{{% endif %}}"
    template = SAYS.replace("%s", f"{{% generation %}}{call}{{% endgeneration %}}")
    tokenizer = new_chat_tokenizer(["Why? So."], "{{ tools }}" + template)
    turns = [USER, {**CALL, "content": "Hm."}, TOOL, ANSWER]
    exchange = Exchange("row 1", (), turns, [{"function": {"name": "add"}}])
    with nullcontext() if dropped != "calls" else pytest.raises(DatasetError, match="the calls of"):
        assert Renderer(tokenizer, learn_all=False)(exchange).dropped == dropped


FROM_ARROW = {"x": 1, "y": None, "z": [{"a": "é", "b": None}]}


@pytest.mark.parametrize("given", [FROM_ARROW, '{"x": 1, "z": [{"a": "é"}]}'])
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize(
    "use",
    [
        "{{ c.arguments | tojson }}",
        "{{ c.arguments }}",
        "{{ '' + c.arguments + '' }}",
        '{"x": {{ c.arguments["x"] }}, "z": {{ c.arguments.items() | list | last | last | tojson }}}',
    ],
)
def test_calls_of_tools_are_objects_or_texts_to_templates(given: Any, flat: bool, use: str) -> None:
    """Without the names that Arrow's rows get from others."""
    call = {"name": "f", "arguments": given}
    called = {**CALL, "tool_calls": [call if flat else {"function": call, "id": None}]}
    row = chat(USER, called, TOOL, ANSWER, tools=[{"properties": FROM_ARROW}])
    exchange = read_exchange("a.parquet: row 1", row, ["messages"])
    assert exchange.tools == [{"properties": {"x": 1, "z": [{"a": "é"}]}}]
    path = "m.tool_calls[0]" if flat else "m.tool_calls[0].function"
    use = f"{{% set c = {path} %}}{{{{ c.name }}}}{use}"
    said = f"{{% if m.tool_calls %}}{use}{{% else %}}{{{{ m.content }}}}{{% endif %}}"
    tools = "{% for tool in tools %}{{ tool.properties.x }};{% endfor %}"
    tokenizer = new_chat_tokenizer(["Why? So."], tools + SAYS.replace("%s", said))
    text = Renderer(tokenizer, learn_all=False)(exchange).text
    assert text == '1;Why?f{"x": 1, "z": [{"a": "é"}]}5So.'
    assert "id" not in exchange.turns[1]["tool_calls"][0]
    prompt = encode_prompt(Loaded(None, tokenizer), Row("a.parquet: row 1", row))
    assert tokenizer.decode(prompt) == text.removesuffix("So.")


@pytest.mark.parametrize("calls", ["", "[]", "null", json.dumps(ADDS)])
def test_calls_may_be_a_json_text(calls: str) -> None:
    says = "{% if m.tool_calls and m.tool_calls[0:2] == '[{' %}{{ m.tool_calls }}{% endif %}"
    tokenizer = new_chat_tokenizer(["Why? So."], SAYS.replace("%s", says + "{{ m.content }}"))
    turns = (USER, {**ANSWER, "tool_calls": calls})
    found = Renderer(tokenizer, learn_all=True)(Exchange("row 1", (), turns))
    assert found.text == f"Why?{calls if 'add' in calls else ''}So."
    assert found.dropped == []


@pytest.mark.parametrize("place", ["a.jsonl: line 1", "a.json: row 1", "a.JSON.gz: row 1", "row 1"])
def test_nulls_in_json_are_kept(place: str) -> None:
    function = {"name": "f", "arguments": {"unit": None}}
    called, tools = {**CALL, "tool_calls": [{"function": function}]}, [{"default": None}]
    row = chat(USER, called, TOOL, ANSWER, tools=tools)
    exchange = read_exchange(place, row, ["messages"])
    assert exchange.turns[1]["tool_calls"] == called["tool_calls"]
    assert exchange.turns[1]["content"] == ""
    assert exchange.tools == tools
    assert type(function["arguments"]) is dict, "the row stays as it is"
    continued = [USER, {**ANSWER, "weight": 0.5}, USER]  # where weights do not matter
    assert read_turns("row 1", continued) == continued
