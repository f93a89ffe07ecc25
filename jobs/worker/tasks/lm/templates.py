"""Chats as texts, by a tokenizer's template, and which characters of them are learned."""

from __future__ import annotations

from collections.abc import Sequence
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
    "mark the assistant's words by {% generation %} in a template of your own (--chat-template)"
)

TODAY = datetime(2024, 7, 26)
"""The day that a chat template writes as today's: a run that resumes on another day has the same samples.

Llama's templates write this day themselves if they can't ask for today's.
"""


class Rendered(NamedTuple):
    """A text, and which ranges of its characters are learned."""

    text: str
    learned: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Renderer:
    """Makes texts of exchanges. Raises :class:`DatasetError`, beginning with the place."""

    tokenizer: Any
    learn_all: bool

    def __call__(self, exchange: Exchange) -> Rendered:
        if exchange.turns:
            text, learned = self._render_chat(exchange)
        else:
            text, end = exchange.prompt + exchange.completion, self.tokenizer.eos_token
            text += "" if text.endswith(end) else end
            learned = [(len(exchange.prompt), len(text))]
        return Rendered(text, [(0, len(text))] if self.learn_all else learned)

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
        """Return a text and the ranges that its template marks; with ``cue``, an answer would be next."""
        from transformers.utils.chat_template_utils import (
            _compile_jinja_template,
            render_jinja_template,
        )

        tokenizer = self.tokenizer
        try:
            template = tokenizer.get_chat_template(tools=exchange.tools)
            # The compiled template is kept. As an argument, a function would become a text.
            _compile_jinja_template(template).globals["strftime_now"] = TODAY.strftime
            marks = marks_answers(template)

            def render(chat: list[Turn]) -> tuple[str, Any]:
                (text,), marked = render_jinja_template(
                    conversations=[chat],
                    tools=exchange.tools,
                    chat_template=template,
                    return_assistant_tokens_mask=marks,
                    add_generation_prompt=cue,
                    **tokenizer.special_tokens_map,
                )
                return text, marked[0] if marks else None

            return render_calls(turns, render)
        # Templates raise TemplateError and, for what they miss in a turn, many other types.
        except Exception as error:
            raise DatasetError(
                f"{exchange.place}: the chat template fails: {first_line(error)}",
                hint="correct the row, or give another template with --chat-template",
            ) from error


def _require_turns(exchange: Exchange, text: str) -> None:
    """Raise :class:`DatasetError` for a turn that the template has dropped."""
    at = 0
    for number, turn in enumerate(exchange.turns, start=1):
        # Templates omit the thoughts of earlier turns, and may write what tools get and return as JSON.
        words = turn["content"].rpartition("</think>")[2].strip()
        if turn["role"] == "tool" or turn.get("tool_calls"):
            continue
        is_system = turn["role"] == "system"  # may be anywhere
        found = text.find(words, 0 if is_system else at)
        if found < 0:
            raise DatasetError(
                f"{exchange.place}: the chat template drops turn {number} ({turn['role']}): {show(words)}",
                hint="remove the turn, or give another template with --chat-template",
            )
        at = at if is_system else found + len(words)


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
