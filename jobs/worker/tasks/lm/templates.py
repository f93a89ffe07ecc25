"""Chats as texts, by a tokenizer's template, and which characters of them are learned."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from datetime import datetime
from itertools import compress
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, NamedTuple

from ...data.records import noting, show
from ...runtime.errors import DatasetError, first_line
from .chats import Exchange, Turn, is_learned, marks_answers, render_calls

if TYPE_CHECKING:
    from ...runtime.ranks import Ranks

_MARK_HINT = (
    'give earlier answers "weight": 0, so that only the last is learned, or mark the assistant\'s words by '
    "{% generation %} in a template of your own (--chat-template)"
)

TODAY = datetime(2024, 7, 26)
"""The day that a chat template writes as today's: a run that resumes on another day has the same samples.

Llama's templates write this day themselves if they can't ask for today's.
"""


_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""What data call an answer's reasoning beside its content."""
_DROPPED = {
    "words": "what is said beside calls of tools in {} rows: give a template that writes it "
    "(--chat-template) if it is to be learned",
    "tools": "the tools of {} rows: remove the column, or give a template that writes them "
    "(--chat-template)",
    "thoughts": "the reasoning of {} last answers: put it into the content as <think>…</think>, or give "
    "a template that writes it (--chat-template)",
}


class Rendered(NamedTuple):
    """A text, which ranges of its characters are learned, and what of the row it lacks."""

    text: str
    learned: Sequence[tuple[int, int]]
    dropped: Sequence[str] = ()
    """Keys of ``_DROPPED``."""


@dataclass(frozen=True)
class Renderer:
    """Makes texts of exchanges. Raises :class:`DatasetError`, beginning with the place."""

    tokenizer: Any
    learn_all: bool

    def __call__(self, exchange: Exchange) -> Rendered:
        dropped = list[str]()
        if exchange.turns:
            text, marked = self._render(exchange, exchange.turns)
            dropped = self._find_dropped(exchange, text)
            learned = self._find_learned(exchange, text, marked)
        else:
            text, end = exchange.prompt + exchange.completion, self.tokenizer.eos_token
            text += "" if text.endswith(end) else end
            learned = [(len(exchange.prompt), len(text))]
        return Rendered(text, [(0, len(text))] if self.learn_all else learned, dropped)

    def _find_learned(
        self, exchange: Exchange, text: str, marked: Sequence[tuple[int, int]] | None
    ) -> Sequence[tuple[int, int]]:
        turns = exchange.turns
        if exchange.prompt:
            return [(self._begin(exchange, text, exchange.prompt), len(text))]
        places = [n for n, turn in enumerate(turns) if turn["role"] == "assistant"]
        if marked is not None:
            if not any(end > begin for begin, end in marked):
                raise DatasetError(
                    f"{exchange.place}: the chat template marks no words of the assistant",
                    hint="enclose them and the turn's end by {% generation %} and {% endgeneration %}",
                )
            return self._choose(exchange, marked, [is_learned(turns[n]) for n in places])
        return [
            (
                self._begin(exchange, text, turns[:place]),
                self._end(exchange, text, turns[: place + 1]),
            )
            for place in places
            if is_learned(turns[place])
        ]

    def _find_dropped(self, exchange: Exchange, text: str) -> list[str]:
        """Return what the template drops. Raises :class:`DatasetError` for turns and calls of tools.

        Rendering takes most of the time: a chat is only rendered again if the text lacks a name or thought,
        or a turn names what it calls elsewhere.
        """
        turns, (places, found) = exchange.turns, _find_words(exchange, text)
        ends = [*(words for _, words in places[1:]), len(text)]
        if not all(
            _are_shown(turn, text[begin:end])
            for turn, (begin, _), end in zip(turns, places, ends, strict=True)
        ) and self._drops_calls(exchange, text):
            raise DatasetError(
                f"{exchange.place}: the chat template drops the calls of tools (tool_calls), or some of them",
                hint="leave out the row, or give another template with --chat-template",
            )
        if tools := exchange.tools:
            said = json.dumps(turns, ensure_ascii=False, default=str)
            names = ["".join(_names([each])) for each in tools]
            known = [bool(name) and text.count(name) > said.count(name) for name in names]
            less = [*compress(tools, known)] or None
            if not all(known) and self._is_same(exchange._replace(tools=less), text):
                found.append("tools")
        # Templates may leave out the thoughts of earlier answers.
        thoughts = [turns[-1][name] for name in _THOUGHTS if turns[-1].get(name)]
        is_known = any(isinstance(each, str) and each.strip() in text for each in thoughts)
        if thoughts and not is_known and self._is_same(exchange, text, *_THOUGHTS):
            found.append("thoughts")
        return found

    def _drops_calls(self, exchange: Exchange, text: str) -> bool:
        """Return whether the text does not depend on the name of each call."""
        turns = deepcopy(exchange.turns)
        functions = [each for turn in turns for each in _functions(turn.get("tool_calls"))]
        if not functions:  # calls as a JSON text
            return self._is_same(exchange, text, "tool_calls")
        marks = [f"q{number}z" for number in range(len(functions))]
        for function, mark in zip(functions, marks, strict=True):
            function["name"] += mark
        try:
            marked = self._render(exchange, turns)[0].casefold()
        except DatasetError:  # the template knows the names
            return False
        return not all(mark in marked for mark in marks)

    def _is_same(self, exchange: Exchange, text: str, *names: str) -> bool:
        """Return whether the text would be the same if no turn had these fields."""
        turns = [{k: v for k, v in turn.items() if k not in names} for turn in exchange.turns]
        with suppress(DatasetError):  # the template needs them
            return self._render(exchange, turns)[0] == text
        return False

    @staticmethod
    def _choose(
        exchange: Exchange, marked: Sequence[tuple[int, int]], learned: Sequence[bool]
    ) -> Sequence[tuple[int, int]]:
        """Return the ranges of the answers that are learned."""
        if not all(learned) and len(marked) != len(learned):
            raise DatasetError(
                f"{exchange.place}: the chat template marks {len(marked)} parts of {len(learned)} answers, "
                "so those with the weight 0 can't be found",
                hint="mark each answer as one part (--chat-template), or remove the weights",
            )
        return marked if all(learned) else [*compress(marked, learned)]

    def _begin(self, exchange: Exchange, text: str, turns: Sequence[Turn]) -> int:
        """Return where the answer to these turns begins in the text of all: what the model will be given."""
        end = self._end(exchange, text, turns)
        cue, _ = self._render(exchange, turns, cue=True)
        return max(end, len(commonprefix([cue, text])))  # noqa: RUF071 - of characters

    def _end(self, exchange: Exchange, text: str, turns: Sequence[Turn]) -> int:
        """Return where these turns end in the text of all."""
        known, _ = self._render(exchange, turns)
        if not text.startswith(known):
            raise DatasetError(
                f"{exchange.place}: the chat template writes turn {len(turns)} differently if others "
                "follow, so the assistant's words can't be found",
                hint=_MARK_HINT,
            )
        return len(known)

    def _render(
        self, exchange: Exchange, turns: Sequence[Turn], *, cue: bool = False
    ) -> tuple[str, Sequence[tuple[int, int]] | None]:
        try:
            return render_chat(self.tokenizer, turns, exchange.tools, cue=cue)
        except ImportError:  # not the template's
            raise
        except Exception as error:
            raise DatasetError(
                f"{exchange.place}: the chat template fails: {first_line(error)}",
                hint="correct the row, or give another template with --chat-template",
            ) from error


def render_chat(
    tokenizer: Any, turns: Sequence[Turn], tools: Any, *, cue: bool
) -> tuple[str, Sequence[tuple[int, int]] | None]:
    """Return a text and the ranges that its template marks; with ``cue``, an answer would be next.

    Raises what the template raises: ``TemplateError`` and, for what it misses in a turn, many other types;
    and ``ImportError`` with other versions of transformers, such as a laptop's.
    """
    from transformers.utils.chat_template_utils import (
        _compile_jinja_template,
        render_jinja_template,
    )

    template = tokenizer.get_chat_template(tools=tools)
    # The compiled template is kept. As an argument, a function would become a text.
    _compile_jinja_template(template).globals["strftime_now"] = TODAY.strftime
    marks = marks_answers(template)

    def render(chat: list[Turn]) -> tuple[str, Any]:
        (text,), marked = render_jinja_template(
            conversations=[chat],
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=marks,
            add_generation_prompt=cue,
            **tokenizer.special_tokens_map,
        )
        return text, marked[0] if marks else None

    return render_calls(turns, render)


def _functions(given: Any) -> list[dict[str, Any]]:
    """Return the named functions of tools or calls, which are objects of their own in OpenAI's."""
    objects = [each for each in given if isinstance(each, dict)] if isinstance(given, list) else []
    found = [each.get("function", each) for each in objects]
    return [each for each in found if isinstance(each, dict) and isinstance(each.get("name"), str)]


def _names(given: Any) -> list[str]:
    return [each["name"] for each in _functions(given)]


def _are_shown(turn: Turn, text: str) -> bool:
    """Return whether a text has the names of the turn's calls, one after the other, and only from them."""
    calls, said = turn.get("tool_calls"), str({**turn, "tool_calls": None})
    names = _names(calls)
    if not names or any(name in said for name in names):
        return not calls or calls in ("[]", "null")
    for name in names:
        _, found, text = text.partition(name)
        if not found:
            return False
    return True


def _find_words(exchange: Exchange, text: str) -> tuple[list[tuple[int, int]], list[str]]:
    """Return for each turn where the one before it ends and where its words are, and what is dropped.

    Raises :class:`DatasetError` for a turn whose words the template has dropped.
    """
    at, places, dropped = 0, list[tuple[int, int]](), set[str]()
    for number, turn in enumerate(exchange.turns, start=1):
        # Templates omit the thoughts of earlier turns, and may write what tools get and return as JSON.
        words, calls = turn["content"].rpartition("</think>")[2].strip(), turn.get("tool_calls")
        forms = {words}
        if turn["role"] == "tool" or calls:
            forms |= {json.dumps(words, ensure_ascii=each)[1:-1] for each in (True, False)}
        is_system = turn["role"] == "system"  # may be anywhere
        found = {form: text.find(form, 0 if is_system else at) for form in forms}
        known = {place: place + len(form) for form, place in found.items() if place >= 0}
        if calls and not known:
            dropped.add("words")
        elif not known:
            raise DatasetError(
                f"{exchange.place}: the chat template drops turn {number} ({turn['role']}): {show(words)}",
                hint="remove the turn, or give another template with --chat-template",
            )
        places.append((at, min(known, default=at)))
        # Gemma 4's template, for one, writes what is said beside calls after what the tools return.
        at = at if is_system or calls else min(known.values())
    return places, [*dropped]


def note_dropped(rendered: Sequence[Rendered], note: Callable[[str], None]) -> None:
    """Count the rows of which the template drops something that is not learned without it."""
    for name, text in _DROPPED.items():
        if count := sum(name in each.dropped for each in rendered):
            note(f"warning: the chat template drops {text.format(count)}")


def render_together(
    ranks: Ranks, exchanges: Sequence[Exchange], render: Renderer, skipped: list[DatasetError]
) -> list[Rendered]:
    """Return the texts on every rank, each made by one of them; bad ones are added to ``skipped``."""
    found, problems = list[Rendered](), list[DatasetError]()
    first, last = (len(exchanges) * each // ranks.size for each in (ranks.rank, ranks.rank + 1))
    for exchange in exchanges[first:last]:
        with noting(problems):
            found.append(render(exchange))
    parts = ranks.gather((found, problems))
    skipped += [each for _, own in parts for each in own]
    return [each for own, _ in parts for each in own]
