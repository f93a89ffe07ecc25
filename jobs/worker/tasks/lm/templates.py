"""Chats as texts, by a tokenizer's template, and which characters of them are learned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from datetime import datetime
from itertools import compress
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, NamedTuple

from ...data.records import noting, require_text, show
from ...runtime.errors import DatasetError, first_line
from .chats import MARKS, Exchange, Turn, is_learned, render_calls

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
            # Of calls, tools, and thoughts, only this text is checked.
            require_text(text, f"{exchange.place}: the chat")
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
        """Return what the template drops. Raises :class:`DatasetError` for turns and calls of tools."""
        lost = self._find_lost(exchange, text, names=True)
        if lost is None or "turn" in lost:  # the template knows the names, or compares them
            lost = self._find_lost(exchange, text, names=False) or {}
        if number := lost.get("turn", 0):
            turn = exchange.turns[number - 1]
            raise DatasetError(
                f"{exchange.place}: the chat template drops turn {number} ({turn['role']}): "
                f"{show(turn['content'].strip())}",
                hint="remove the turn, or give another template with --chat-template",
            )
        if "calls" in lost:
            raise DatasetError(
                f"{exchange.place}: the chat template drops the calls of tools (tool_calls), or some of them",
                hint="leave out the row, or give another template with --chat-template",
            )
        return [name for name in _DROPPED if name in lost]

    def _find_lost(self, exchange: Exchange, text: str, *, names: bool) -> dict[str, int] | None:
        """Return what is lost, and in which turn first; ``None`` for a chat that can't be rendered.

        All that should be in the text, or all but the ``names`` of tools, gets a mark.
        """
        turns, tools = [*map(deepcopy, exchange.turns)], deepcopy(exchange.tools)
        marks = dict[str, tuple[str, int]]()

        def mark(part: Any, name: str, what: str, number: int) -> None:
            word = f"q{what}{number}z"
            marks[word] = what, number
            part[name] += word

        for number, turn in enumerate(turns, start=1):
            calls = turn.get("tool_calls")
            if turn["content"]:
                mark(turn, "content", "words" if calls else "turn", number)
            for function in _functions(calls) if names else ():
                mark(function, "name", "calls", len(marks))
            if names and isinstance(calls, str) and calls not in ("", "[]", "null"):
                mark(turn, "tool_calls", "calls", len(marks))
        # Templates may leave out the thoughts of earlier answers.
        for name in _THOUGHTS:
            thought = turns[-1].get(name)
            if isinstance(thought, str) and thought.strip() not in text:
                mark(turns[-1], name, "thoughts", 0)
        for function in _functions(tools) if names else ():
            mark(function, "name", "tools", len(marks))
        try:
            marked = self._render(exchange._replace(tools=tools), turns)[0].casefold()
        except DatasetError:
            return None
        lost = dict(what for word, what in reversed(marks.items()) if word not in marked)
        return {**lost, **dict.fromkeys(self._find_nameless(exchange, text), 0)}

    def _find_nameless(self, exchange: Exchange, text: str) -> Iterator[str]:
        """Yield "calls" or "tools" if they have no names and the text is the same without them."""
        turns, tools = exchange.turns, exchange.tools
        calls = [each["tool_calls"] for each in turns if each.get("tool_calls")]
        less = list[tuple[str, Exchange, Sequence[Turn]]]()
        if calls and not any(isinstance(each, str) or _functions(each) for each in calls):
            silent = [{k: v for k, v in each.items() if k != "tool_calls"} for each in turns]
            less.append(("calls", exchange, silent))
        if tools and not _functions(tools):
            less.append(("tools", exchange._replace(tools=None), turns))
        for what, other, rest in less:
            with suppress(DatasetError):  # the template needs them
                if self._render(other, rest)[0] == text:
                    yield what

    @staticmethod
    def _choose(
        exchange: Exchange, marked: Sequence[tuple[int, int]], learned: Sequence[bool]
    ) -> Sequence[tuple[int, int]]:
        """Return the ranges of the answers that are learned."""
        if not any(end > begin for begin, end in marked):
            raise DatasetError(
                f"{exchange.place}: the chat template marks no words of the assistant",
                hint="enclose them and the turn's end by {% generation %} and {% endgeneration %}",
            )
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
    marks = bool(MARKS.search(template))

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
    given = given if isinstance(given, list) else [given]
    objects = [each for each in given if isinstance(each, dict)]
    found = [each.get("function", each) for each in objects]
    return [each for each in found if isinstance(each, dict) and isinstance(each.get("name"), str)]


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
