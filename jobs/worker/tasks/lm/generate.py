"""Text from a language model: what follows a text, or the next answer of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any
from zlib import crc32

import torch

from ...data.records import require_text
from ...data.tokens import read_template
from ...runtime.errors import DatasetError, first_line
from ...training.model import longest_input
from ...training.task import Loaded
from ...training.text_task import Row
from .chats import Turn, read_tools, read_turns, render_calls
from .head import parts
from .samples import read_prefix
from .templates import render_chat

NEW_TOKENS, SEED = 256, 42
TOGETHER = 32
"""Rows that are generated together."""

_UNMASKED = {
    *("minimax", "recurrent_gemma", "reformer", "rwkv", "xlstm", "xlnet"),
    *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp"),
    *("pegasus", "plbart", "prophetnet", "trocr", "whisper"),
}
"""Models whose texts differ with padding: they ignore the attention mask, wholly or after the first token,
or count padding as places of the text."""

Ids = Sequence[int]


def complete(loaded: Loaded, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return what the model adds to each row's text, or answers in its chat.

    Rows of similar length are computed together, with padding on the left; for models that can't leave
    padding out, those of equal length. Raises :class:`DatasetError`.
    """
    asked, limit = loaded.settings, longest_input(loaded)
    most: int = asked.get("max_new_tokens", NEW_TOKENS)
    prompts = [encode_prompt(loaded, row) for row in rows]
    rooms = [most if limit is None else min(most, limit - len(each)) for each in prompts]
    for row, ids, room in zip(rows, prompts, rooms, strict=True):
        if not ids:
            raise DatasetError(f"{row.place}: has no tokens to continue")
        if room < 1:
            what = f"{row.place}: has {len(ids)} tokens"
            raise DatasetError(f"{what}, and the model takes {limit} with the new ones")
    found: dict[int, dict[str, Any]] = {}
    order = sorted(range(len(rows)), key=lambda n: (-rooms[n], len(prompts[n])))
    is_padded = loaded.model.config.model_type not in _UNMASKED
    widths = [0 if is_padded else len(each) for each in prompts]
    for (room, _), numbers in groupby(order, key=lambda n: (rooms[n], widths[n])):
        same = [*numbers]
        for part in parts(len(same), TOGETHER):
            some = same[part]
            # Each batch has its own random numbers, whichever rank computes it, and wherever the file is.
            lines = " ".join(rows[n].place.rpartition(" ")[2] for n in some)
            seed = asked.get("seed", SEED) + crc32(lines.encode())
            new = _generate(loaded, [prompts[n] for n in some], room, seed)
            found |= dict(zip(some, new, strict=True))
    return [found[n] for n in range(len(rows))]


def encode_prompt(loaded: Loaded, row: Row) -> Ids:
    """Return a row's tokens: its ``messages`` or ``text`` as a chat, a text in ``prompt`` as it is.

    Chats are written as in training, with the row's ``tools``. A ``text`` is also used as it is if the
    tokenizer has no chat template.
    """
    tokenizer = loaded.tokenizer
    values = row.values if isinstance(row.values, dict) else {}
    name = "messages" if "messages" in values else "prompt"
    if name == "messages" or isinstance(values.get(name), list):
        chat = _read_chat(f"{row.place}: {name!r}", values.get(name))
        if not tokenizer.chat_template:
            raise DatasetError(
                f"{row.place}: the model has no chat template for messages: give each prompt as a text, or "
                "train with a tokenizer that has a template"
            )
    elif "prompt" in values or not tokenizer.chat_template:
        return encode_text(loaded, row.text("prompt" if "prompt" in values else "text"))
    else:
        chat = [{"role": "user", "content": row.text("text")}]
    tools = read_tools(f"{row.place}: 'tools'", values.get("tools"))
    try:
        text = _render_prompt(tokenizer, chat, tools)
    except Exception as error:  # of jinja: templates refuse roles that they don't know
        raise DatasetError(f"{row.place}: the chat template fails: {first_line(error)}") from error
    text = require_text(text, f"{row.place}: the chat")
    chat_ids: Ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return chat_ids


def _render_prompt(tokenizer: Any, chat: Sequence[Turn], tools: Any) -> str:
    with suppress(ImportError):  # this machine may have another version of transformers
        return render_chat(tokenizer, chat, tools, cue=True)[0]
    options = {"tools": tools, "add_generation_prompt": True, "tokenize": False}
    return render_calls(chat, lambda turns: str(tokenizer.apply_chat_template(turns, **options)))


def encode_text(loaded: Loaded, text: str) -> list[int]:
    """Return the tokens of a text that is not a chat, without its end."""
    tokenizer = loaded.tokenizer
    are_pairs = "prompt" in getattr(loaded.model.config, "data_columns", {})
    prefix = read_template(tokenizer, pair=False).prefix if are_pairs else read_prefix(tokenizer)
    return [*prefix.tolist(), *tokenizer(text, add_special_tokens=False)["input_ids"]]


def _read_chat(what: str, value: Any) -> list[Turn]:
    """Return a chat up to the last turn that is not the assistant's, which the model then answers."""
    chat = read_turns(what, value)
    while chat and chat[-1]["role"] == "assistant":
        chat.pop()
    if not chat:
        raise DatasetError(f"{what} has no turn to answer")
    return chat


def _generate(loaded: Loaded, prompts: Sequence[Ids], room: int, seed: int) -> list[dict[str, Any]]:
    model, tokenizer, asked = loaded.model, loaded.tokenizer, loaded.settings
    tokenizer.padding_side = "left"
    ids = {"input_ids": [list(each) for each in prompts]}
    batch = tokenizer.pad(ids, return_tensors="pt", return_attention_mask=True)
    width = batch["input_ids"].shape[1]
    ends = find_ends(loaded)
    temperature = asked.get("temperature", 0.0)
    # By default, transformers draws only from the 50 likeliest tokens.
    sampling = {"temperature": temperature, "top_p": asked.get("top_p", 1.0), "top_k": 0}
    # Generation has no use for the loss of the routers, which fails for prompts with padding.
    more = {"output_router_logits": False} if hasattr(model.config, "output_router_logits") else {}
    with torch.inference_mode(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        rows = model.eval().generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=room,
            do_sample=bool(temperature),
            pad_token_id=loaded.pad_token,
            eos_token_id=ends,
            **(sampling if temperature else {}),
            **more,
        )
    return [
        _describe(tokenizer, ids, row[width:].tolist(), ends)
        for ids, row in zip(prompts, rows, strict=True)
    ]


def find_ends(loaded: Loaded) -> list[int]:
    """Return the tokens that end a text: the tokenizer's, and those of the model's generation config."""
    own = getattr(loaded.model.generation_config, "eos_token_id", None)
    several = own if isinstance(own, list) else [own]
    return sorted({each for each in (*several, loaded.tokenizer.eos_token_id) if each is not None})


def _describe(tokenizer: Any, prompt: Ids, new: list[int], ends: Sequence[int]) -> dict[str, Any]:
    stop = next((n for n, each in enumerate(new) if each in ends), None)
    # Together with the prompt: alone, the first token may lose its space.
    before = tokenizer.decode(prompt, skip_special_tokens=True)
    whole = tokenizer.decode([*prompt, *new[:stop]], skip_special_tokens=True)
    reason = "length" if stop is None else "stop"
    return {"completion": whole[len(before) :], "finish_reason": reason}
