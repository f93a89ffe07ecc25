"""Prompts with completions, and chats, as TRL and OpenAI write them: the rows of a table, checked.

The laptop checks rows with this module, and has no tokenizer: what a chat's template does is checked later.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ...data.records import require_text, show
from ...data.table import Table
from ...runtime.errors import DatasetError
from ...training.options import SCRATCH

CHATS = ("messages", "conversations")
PAIR = ("prompt", "completion")
"""Names of columns."""
_NEXT = {
    "": ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
"""The roles that can follow a role in a chat; at first, that of nothing."""
_ROLES = tuple(_NEXT)[1:]
_SHAPE = '{"role": "user", "content": "Why?"}'
MARKS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""What encloses the assistant's words in a template, for transformers."""
_ROW = re.compile(r"(?<!\.json)(?<!\.gz): row \d", re.IGNORECASE)
"""What places of rows have that are from Parquet, Arrow, or the hub; text files have lines.

Arrow's objects have the names of all rows' ones.
"""

Turn = Mapping[str, Any]


Found = TypeVar("Found", str, tuple[str, Any])


class Arguments(dict[str, Any]):
    """The arguments of a tool's call, also as JSON: as the data have it, or made of an object."""

    def __init__(self, found: Mapping[str, Any], text: str | None = None) -> None:
        super().__init__(found)
        self.text = text or json.dumps(found, ensure_ascii=False)


class Exchange(NamedTuple):
    """A prompt and its completion, both texts or both lists of turns; a chat is one without a prompt."""

    place: str
    prompt: Any
    completion: Any
    tools: Any = None

    @property
    def turns(self) -> list[Turn]:
        """All turns; none if it consists of texts."""
        return [] if isinstance(self.completion, str) else [*self.prompt, *self.completion]

    @property
    def texts(self) -> Iterator[str]:
        """All that was said."""
        if isinstance(self.completion, str):
            yield from (self.prompt, self.completion)
        yield from (each["content"] for each in self.turns if each["content"])


def find_columns(table: Table, asked: str | None) -> list[str]:
    """Return the column of chats, or those of prompts and completions; none for a table of plain texts.

    ``asked`` is the column that the user named. Raises :class:`DatasetError`.
    """
    known = {name.strip(): name for name in reversed(table.columns)}
    if asked is not None:
        return [asked] if asked.strip() in CHATS and asked in table.columns else []
    chats, pair = ([known[name] for name in names if name in known] for names in (CHATS, PAIR))
    if chats and len(pair) == len(PAIR):
        raise DatasetError(
            f"{table.source}: has chats, in {chats[0]!r}, and also prompts with completions",
            hint=f"use --text-column {chats[0]}, or remove that column",
        )
    return chats[:1] or (pair if len(pair) == len(PAIR) else [])


def require_whole(table: Table) -> None:
    """Raise :class:`DatasetError` for a table without texts that has no prompts with completions."""
    names = [name for name in map(str.strip, table.columns) if name]
    if "chosen" in names or (len(names) > 1 and not {*PAIR} & {*names}):
        chosen = "; of preferences, only the chosen answers" * ("chosen" in names)
        raise DatasetError(
            f"{table.source}: which columns? It has {', '.join(names)}",
            hint=f"rename them to {PAIR[0]!r} and {PAIR[1]!r}, or {CHATS[0]!r} with lists of turns{chosen}; "
            "or name the only one to learn with --text-column",
        )
    for one, other in (PAIR, PAIR[::-1]):
        if one in names:
            raise DatasetError(
                f"{table.source}: has a column {one!r} and no {other!r}",
                hint=f"add the column {other!r}, or name one of plain texts with --text-column",
            )


def read_exchange(place: str, row: Mapping[str, Any], columns: Sequence[str]) -> Exchange:
    """Return a row's chat, or its prompt and completion. Raises :class:`DatasetError` with the place."""
    values = [row.get(name) for name in columns]
    for name, value in zip(columns, values, strict=True):
        if value is None:
            raise DatasetError(f"{place}: has no {name!r}", hint="add it, or leave out the row")
    whats = [f"{place}: column {name!r}" for name in columns]
    tools = read_tools(f"{place}: column 'tools'", row.get("tools"))
    if len(columns) == 1:
        turns = read_turns(whats[0], values[0])
        _require_order(whats[0], turns)
        _require_weights(whats[0], turns)
        if not any(each["role"] == "assistant" and is_learned(each) for each in turns):
            raise DatasetError(
                f"{whats[0]} has no turn of the assistant that can be learned",
                hint="add the answer, or leave out the row",
            )
        return Exchange(place, (), turns, tools)
    if isinstance(values[0], list) != isinstance(values[1], list):
        names = ["a list of turns" if isinstance(each, list) else "a text" for each in values]
        raise DatasetError(
            f"{place}: {columns[0]!r} is {names[0]}, and {columns[1]!r} is {names[1]}",
            hint="give both as texts, or both as lists of turns",
        )
    if not isinstance(values[0], list):
        return Exchange(place, *map(require_text, values, whats))
    prompt, answer = map(read_turns, whats, values)
    if answer[0]["role"] != "assistant":
        raise DatasetError(
            f"{whats[1]} begins with the role {answer[0]['role']!r}",
            hint="begin it with a turn of the assistant, and end the prompt with one of the user",
        )
    _require_order(f"{place}: prompt and completion", [*prompt, *answer])
    _require_weights(whats[1], answer)
    if not all(map(is_learned, answer)):
        raise DatasetError(
            f"{whats[1]} has a turn with the weight 0, and completions are learned as a whole",
            hint=f"write prompt and completion as one chat in {CHATS[0]!r}",
        )
    return Exchange(place, prompt, answer, tools)


def read_turns(what: str, value: Any) -> list[Turn]:
    """Return a chat's turns. Raises :class:`DatasetError` with ``what``."""
    if not isinstance(value, list):
        raise DatasetError(
            f"{what} is not a list of turns",
            hint=f"write each turn as {_SHAPE}, in JSON lines or Parquet",
        )
    if not value:
        raise DatasetError(f"{what} has no turns", hint="leave out the row")
    return [_read_turn(f"{what}, turn {number}", each) for number, each in enumerate(value, 1)]


def _read_turn(what: str, value: Any) -> Turn:
    if not isinstance(value, dict) or "role" not in value:
        raise DatasetError(f"{what} has no role and content", hint=f"write it as {_SHAPE}")
    copy = _copy(value, is_padded=bool(_ROW.search(what)))
    turn = {name: each for name, each in copy.items() if each is not None}
    _read_arguments(turn.get("tool_calls"))
    role, content = turn.get("role"), turn.setdefault("content", "")
    if role not in _ROLES:
        raise DatasetError(
            f"{what} has the role {show(str(role))}", hint=f"roles are {', '.join(_ROLES)}"
        )
    # A call of a tool may have no words, and a tool may return none.
    if content == "" and (role == "tool" or (role == "assistant" and turn.get("tool_calls"))):
        return turn
    if isinstance(content, list):
        raise DatasetError(
            f"{what}: the content is a list of parts",
            hint="join their texts to one; only texts are read",
        )
    require_text(content, f"{what}: the content")
    return turn


def _require_weights(what: str, turns: Sequence[Turn]) -> None:
    for number, turn in enumerate(turns, start=1):
        if turn["role"] == "assistant" and turn.get("weight", 1) not in (0, 1):
            raise DatasetError(
                f"{what}, turn {number} has the weight {show(str(turn['weight']))}",
                hint="give 0 to answers that are not learned, and 1 to others",
            )


def is_learned(turn: Turn) -> bool:
    """Return whether a turn may be learned: in OpenAI's chats, one with the weight 0 is not."""
    return bool(turn.get("weight", 1))


def _copy(value: Any, *, is_padded: bool) -> Any:
    """Return a copy of a value, without what may be padding."""
    if isinstance(value, dict):
        found = value.items()
        return {k: _copy(v, is_padded=is_padded) for k, v in found if not (is_padded and v is None)}
    return [_copy(v, is_padded=is_padded) for v in value] if isinstance(value, list) else value


def _read_arguments(calls: Any) -> None:
    """Replace the arguments of calls, which are objects or, as in OpenAI's chats, JSON."""
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict):
            continue
        given = function.get("arguments")
        text = given if isinstance(given, str) else None
        with suppress(TypeError, ValueError, RecursionError):
            found = given if text is None else json.loads(text)
            if isinstance(found, dict):
                function["arguments"] = Arguments(found, text)


def render_calls(turns: Sequence[Turn], render: Callable[[list[Turn]], Found]) -> Found:
    """Return what a template makes of turns, with the arguments of calls as objects.

    For templates that append or print them as texts, they are JSON.
    """
    calls = list[Arguments]()
    texts: list[Turn] = _with_texts([*turns], calls)
    if not calls:
        return render([*turns])
    try:
        found = render([*turns])
    except Exception:
        with suppress(Exception):
            return render(texts)
        raise
    text = found if isinstance(found, str) else found[0]
    return render(texts) if any(each and repr(each) in text for each in calls) else found


def _with_texts(value: Any, calls: list[Arguments]) -> Any:
    """Return turns with the texts of all arguments, which are added to ``calls``."""
    if isinstance(value, Arguments):
        calls.append(value)
        return value.text
    if isinstance(value, Mapping):
        return {name: _with_texts(each, calls) for name, each in value.items()}
    return [_with_texts(x, calls) for x in value] if isinstance(value, (list, tuple)) else value


def _require_order(what: str, turns: Sequence[Turn]) -> None:
    before = ""
    for number, turn in enumerate(turns, start=1):
        role = turn["role"]
        if role not in _NEXT[before]:
            where = f"after one of {before!r}" if before else "at the beginning"
            raise DatasetError(
                f"{what}, turn {number} is one of {role!r} {where}",
                hint=f"there, only {' or '.join(_NEXT[before])} can be: join turns of one role, or leave "
                "out the row",
            )
        before = role


def read_tools(what: str, value: Any) -> Any:
    """Return the tools that a chat's template gets, which may be JSON, as in TRL."""
    try:
        is_json = isinstance(value, str) and value
        found = json.loads(value) if is_json else _copy(value, is_padded=bool(_ROW.search(what)))
    except ValueError:
        found = value
    if found and not (isinstance(found, list) and all(isinstance(each, dict) for each in found)):
        raise DatasetError(f"{what} is not a list of tools, as objects or as JSON")
    return found or None


def read_chat_template(name: str) -> str:
    """Return the template in a file. Raises :class:`DatasetError` for one that is no template."""
    from jinja2 import Environment, TemplateSyntaxError

    what = f"--chat-template {name}"
    try:
        text = Path(name).read_text(encoding="utf-8-sig")  # a mark would begin every chat
        # transformers' own marks, which jinja does not know.
        known = MARKS.sub(lambda each: "{% endif %}" if each[1] else "{% if true %}", text)
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(known)
    except OSError as error:
        raise DatasetError(f"{what}: can't be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise DatasetError(f"{what}: is not UTF-8", hint="save it as UTF-8") from None
    except TemplateSyntaxError as error:
        raise DatasetError(
            f"{what}: line {error.lineno}: is no Jinja template: {error.message}",
            hint="copy one from a chat model, such as its chat_template.jinja",
        ) from None
    if "messages" not in text:
        raise DatasetError(
            f"{what}: does not use 'messages', so it would drop every turn",
            hint="copy one from a chat model, such as its chat_template.jinja",
        )
    return text


def may_have_template(model: str) -> bool:
    """Return whether a model's tokenizer has a chat template, as far as this machine knows."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return model != SCRATCH
    settings = folder / "tokenizer_config.json"
    return (folder / "chat_template.jinja").exists() or (
        settings.exists() and '"chat_template"' in settings.read_text(encoding="utf-8")
    )
