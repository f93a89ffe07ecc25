"""Chats as texts, by a tokenizer's template, and which characters of them are learned."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
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
            text, learned = self._render_chat(exchange)
            dropped = self._find_dropped(exchange, text)
        else:
            text, end = exchange.prompt + exchange.completion, self.tokenizer.eos_token
            text += "" if text.endswith(end) else end
            learned = [(len(exchange.prompt), len(text))]
        return Rendered(text, [(0, len(text))] if self.learn_all else learned, dropped)

    def _render_chat(self, exchange: Exchange) -> tuple[str, Sequence[tuple[int, int]]]:
        turns = exchange.turns
        text, marked = self._render(exchange, turns)
        _require_turns(exchange, text)
        if exchange.prompt:
            return text, [(self._begin(exchange, text, exchange.prompt), len(text))]
        places = [n for n, turn in enumerate(turns) if turn["role"] == "assistant"]
        if marked is not None:
            if not any(end > begin for begin, end in marked):
                raise DatasetError(
                    f"{exchange.place}: the chat template marks no words of the assistant",
                    hint="enclose them and the turn's end by {% generation %} and {% endgeneration %}",
                )
            return text, self._choose(exchange, marked, [is_learned(turns[n]) for n in places])
        return text, [
            (
                self._begin(exchange, text, turns[:place]),
                self._end(exchange, text, turns[: place + 1]),
            )
            for place in places
            if is_learned(turns[place])
        ]

    def _find_dropped(self, exchange: Exchange, text: str) -> list[str]:
        """Return what else the template drops. Raises :class:`DatasetError` for calls of tools."""
        turns, found = exchange.turns, list[str]()
        calls = any(turn.get("tool_calls") for turn in turns)
        if calls and self._is_same(exchange, text, "tool_calls"):
            raise DatasetError(
                f"{exchange.place}: the chat template drops the calls of tools (tool_calls)",
                hint="leave out the row, or give another template with --chat-template",
            )
        if exchange.tools and self._is_same(exchange._replace(tools=None), text):
            found.append("tools")
        # Templates may leave out the thoughts of earlier answers.
        if any(map(turns[-1].get, _THOUGHTS)) and self._is_same(exchange, text, *_THOUGHTS):
            found.append("thoughts")
        return found

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
        except Exception as error:
            raise DatasetError(
                f"{exchange.place}: the chat template fails: {first_line(error)}",
                hint="correct the row, or give another template with --chat-template",
            ) from error


def render_chat(
    tokenizer: Any, turns: Sequence[Turn], tools: Any, *, cue: bool
) -> tuple[str, Sequence[tuple[int, int]] | None]:
    """Return a text and the ranges that its template marks; with ``cue``, an answer would be next.

    Raises what the template raises: ``TemplateError`` and, for what it misses in a turn, many other types.
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


def _require_turns(exchange: Exchange, text: str) -> None:
    """Raise :class:`DatasetError` for a turn whose words the template has dropped."""
    at = 0
    for number, turn in enumerate(exchange.turns, start=1):
        # Templates omit the thoughts of earlier turns, and may write what tools get and return as JSON.
        words, calls = turn["content"].rpartition("</think>")[2].strip(), turn.get("tool_calls")
        forms = {words}
        if turn["role"] == "tool" or calls:
            forms |= {json.dumps(words, ensure_ascii=each)[1:-1] for each in (True, False)}
        is_system = turn["role"] == "system"  # may be anywhere
        places = {form: text.find(form, 0 if is_system else at) for form in forms}
        ends = [place + len(form) for form, place in places.items() if place >= 0]
        if not ends:
            raise DatasetError(
                f"{exchange.place}: the chat template drops turn {number} ({turn['role']}): {show(words)}",
                hint=f"remove {'its content' if calls else 'the turn'}, or give another template with "
                "--chat-template",
            )
        # Gemma 4's template, for one, writes what is said beside calls after what the tools return.
        at = at if is_system or calls else min(ends)


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
