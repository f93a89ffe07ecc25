"""Prompts with completions, and chats, as samples: which tokens a language model learns."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from jobs.worker.fast.layers import EMBEDDINGS, freeze_layers
from jobs.worker.runtime.errors import DatasetError, ModelError
from jobs.worker.runtime.ranks import Ranks
from jobs.worker.tasks.lm.generate import encode_prompt
from jobs.worker.tasks.lm.head import IGNORED
from jobs.worker.tasks.lm.model import LmOptions
from jobs.worker.tasks.lm.samples import Masked, learn_end
from jobs.worker.tasks.lm.task import Lm
from jobs.worker.training.batches import TrainingRun
from jobs.worker.training.model import save_model
from jobs.worker.training.options import NO_CACHE, SCRATCH
from jobs.worker.training.text_task import Row
from tests.jobs.worker.tasks.chat_models import (
    CHATML,
    END,
    MARKED,
    TURN,
    TURN_END,
    new_chat_tokenizer,
    save_chat_model,
)
from tests.jobs.worker.threaded_ranks import load_run, run_threaded, session

PAIRS = [
    {"prompt": f"{n} plus {n} is", "completion": f" {2 * n}, {'I think' * (n % 3)}"}
    for n in range(1, 21)
]
CHATS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "user", "content": f"What is {n} plus {n}?"},
            {"role": "assistant", "content": f" It is {2 * n}. "},
            {"role": "user", "content": "Really?"},
            {"role": "assistant", "content": "Yes" + "!" * n},
        ]
    }
    for n in range(1, 11)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = new_chat_tokenizer([json.dumps(row) for row in [*PAIRS, *CHATS]])
    return save_chat_model(tmp_path_factory.mktemp("model"), tokenizer)


def options_for(folder: Path, rows: Any, **more: Any) -> LmOptions:
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared: dict[str, Any] = {"data": str(data), "model": str(folder), "token_cache": NO_CACHE}
    shared |= {"max_length": 64, "batch_size": 4, "compile": "off"}
    return LmOptions(**{**shared, **more})


def load(options: LmOptions, ranks: int = 1, **more: Any) -> tuple[TrainingRun, str]:
    """Return the last rank's run, before its first step, and the notes of the first."""
    said = io.StringIO()
    with patch("jobs.worker.tasks.lm.memory.require_memory"):  # which takes most of the time
        return load_run(Lm(options), ranks, said, **more), said.getvalue()


def learned(run: TrainingRun, number: int) -> str:
    """Return what a sample teaches."""
    sample = run.samples[number]
    ids, labels = sample.inputs["input_ids"], sample.inputs["labels"]
    assert {*labels[labels != ids].tolist()} <= {IGNORED}
    assert weights_of(run)[number] == (labels[1:] != IGNORED).sum()
    text: str = run.loaded.tokenizer.decode(ids[labels != IGNORED])
    return text


def weights_of(run: TrainingRun) -> Any:
    weights = run.task.weights(run.samples)
    assert weights is not None
    return weights


def test_a_completion_and_its_end_are_learned(folder: Path) -> None:
    run, notes = load(options_for(folder, PAIRS))
    assert "special token" not in notes
    tokenizer = run.loaded.tokenizer
    for number, row in enumerate(PAIRS):
        whole = row["prompt"] + row["completion"] + END
        assert run.samples[number].inputs["input_ids"].tolist() == tokenizer(whole)["input_ids"]
        assert learned(run, number) == row["completion"] + END
    assert weights_of(run)[0] == len(tokenizer(PAIRS[0]["completion"] + END)["input_ids"])
    ended = [{"prompt": "a", "completion": f"b{END}"}]
    assert learned(load(options_for(folder, ended))[0], 0) == f"b{END}"


def test_all_tokens_are_learned_if_asked(folder: Path) -> None:
    run, _ = load(options_for(folder, PAIRS, train_on="all"))
    row = PAIRS[3]
    assert learned(run, 3) == row["prompt"] + row["completion"] + END
    assert weights_of(run)[3] == run.samples.lengths[3] - 1
    chats, _ = load(options_for(folder, CHATS, train_on="all"))
    assert learned(chats, 0).startswith("<|im_start|>user\nWhat is 1 plus 1?<|im_end|>\n")


@pytest.mark.parametrize("pad", [None, END])
def test_the_end_is_learned_though_it_pads(folder: Path, tmp_path: Path, pad: str | None) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.pad_token is None
    tokenizer.pad_token = pad
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    run, _ = load(options_for(tmp_path, PAIRS))
    samples = [run.samples[0], run.samples[1]]
    assert len(samples[0]) != len(samples[1])
    batch = run.task.collate(samples, run.loaded)
    assert "attention_mask" not in batch
    for sample, labels in zip(samples, batch["labels"], strict=True):
        assert labels[len(sample) - 1] == run.loaded.tokenizer.eos_token_id
        assert {*labels[len(sample) :].tolist()} <= {IGNORED}
    # Padding changes no loss.
    model, weights = run.loaded.model.eval(), weights_of(run)
    with torch.no_grad():
        both, *alone = (
            float(run.task.loss(model, run.task.collate(each, run.loaded)))
            for each in (samples, samples[:1], samples[1:])
        )
    assert both == pytest.approx(float(alone @ weights[:2]) / int(weights[:2].sum()), rel=1e-5)


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_a_chat_teaches_the_turns_of_the_assistant(folder: Path, template: str) -> None:
    path = folder / "own.jinja"
    path.write_text(template, encoding="utf-8-sig")  # as Windows writes it
    question, answer, *others = CHATS[0]["messages"]
    rows = [{"messages": [question, {**answer, "weight": 0}, *others]}]
    run, _ = load(options_for(folder, rows, chat_template=str(path)))
    assert learned(run, 0).strip() == "Yes!<|im_end|>"
    run, notes = load(options_for(folder, CHATS, chat_template=str(path)))
    line = "\n" if template == CHATML else ""
    tokenizer = run.loaded.tokenizer
    for number, row in enumerate(CHATS):
        turns = row["messages"]
        one, other = (turns[n]["content"] + TURN_END + line for n in (1, 3))
        assert learned(run, number) == one + other
        sample = run.samples[number].inputs
        whole = tokenizer.apply_chat_template(turns, return_assistant_tokens_mask=True)
        assert sample["input_ids"].tolist() == whole["input_ids"]
        if template == MARKED:
            mask = (sample["labels"] != IGNORED).astype(int).tolist()
            assert mask == whole["assistant_masks"]
    # A saved model stops where an answer ends, and has the template.
    assert "answers end with '<|im_end|>'" in notes
    save_model(folder, run.loaded)
    saved = AutoTokenizer.from_pretrained(folder / "model")
    assert (saved.eos_token, saved.chat_template) == (TURN_END, template)
    settings = AutoModelForCausalLM.from_pretrained(folder / "model").generation_config
    assert settings.eos_token_id == saved.eos_token_id != tokenizer.convert_tokens_to_ids(END)


def test_the_completion_of_a_chat_is_all_after_the_prompt(folder: Path) -> None:
    turns = CHATS[0]["messages"]
    run, _ = load(options_for(folder, [{"prompt": turns[:3], "completion": turns[3:]}]))
    assert learned(run, 0) == "Yes!<|im_end|>\n"
    # The cue for an answer is not part of it, even if the template writes another one than in chats.
    thinking = CHATML.replace("assistant\\n' }}{%- endif", "assistant\\n<think>' }}{%- endif")
    run.loaded.tokenizer.chat_template = thinking
    render_again = run.task.prepare(run.context, run.loaded, [*run.task.read(lambda _: None).train])
    assert learned(replace(run, samples=render_again), 0) == "Yes!<|im_end|>\n"


def test_samples_are_the_same_on_another_day(folder: Path) -> None:
    """Llama 3.2's template, for one, writes today's date: a resumed run would have other data."""
    path = folder / "dated.jinja"
    path.write_text("{{ strftime_now('%d %b %Y') }}\n" + CHATML)
    options, found = options_for(folder, CHATS, chat_template=str(path)), []
    for day in (1, 2):
        with patch("transformers.utils.chat_template_utils.datetime") as clock:
            clock.now.return_value = datetime(2026, 1, day)
            found.append(load(options)[0])
    one, other = (run.samples.digest() for run in found)
    assert one == other
    text = found[0].loaded.tokenizer.decode(found[0].samples[0].inputs["input_ids"])
    assert text.startswith("26 Jul 2024<|im_start|>user")
    prompt = encode_prompt(found[0].loaded, Row("row 1", CHATS[0]))
    assert found[0].loaded.tokenizer.decode(prompt).startswith("26 Jul 2024<|im_start|>user")


def test_the_end_is_found_though_samples_are_cut(folder: Path) -> None:
    """In the first sample, the end is cut off."""
    rows = CHATS[:3]
    rows[0] = {"messages": [CHATS[0]["messages"][0], {"role": "assistant", "content": "1 " * 99}]}
    run, notes = load(options_for(folder, rows))
    assert TURN_END not in learned(run, 0)
    assert "answers end with '<|im_end|>'" in notes


@pytest.mark.parametrize("tied", [True, False])
def test_an_end_that_can_not_be_learned_is_noted(folder: Path, tmp_path: Path, tied: bool) -> None:
    """Its weights are those of other unused tokens, as in a model that was never trained on chats."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    save_chat_model(tmp_path, tokenizer, vocab_size=len(tokenizer) + 8, tie_word_embeddings=tied)
    why = "its weights for '<|im_end|>' are those of an unused token"
    assert why not in load(options_for(tmp_path, CHATS, lora=True))[1]
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    rows = model.get_output_embeddings().weight.data
    unused = [*range(len(tokenizer), len(rows)), *tokenizer.convert_tokens_to_ids([TURN, TURN_END])]
    rows[unused] = rows[-1] + 1e-5 * torch.randn(len(unused), rows.shape[1])
    model.save_pretrained(tmp_path)
    adapted = (
        f"{why}, and adapters don't change them; train a model that knows chats, or omit --lora"
    )
    said: list[str] = []
    run, notes = load(options_for(tmp_path, CHATS, lora=True))
    assert adapted in notes
    # As in Llama 3.2 Vision, the model reads a token that it can't write.
    run.loaded.tokenizer.add_tokens("<|image|>", special_tokens=True)
    weight = run.loaded.model.get_output_embeddings().weight
    weight.data = weight.data[: len(tokenizer)]
    assert isinstance(run.samples, Masked)
    learn_end(run.samples, run.loaded, said.append, lora=True)
    assert adapted in said.pop()
    run, notes = load(options_for(tmp_path, CHATS))
    assert why not in notes
    assert isinstance(run.samples, Masked)
    freeze_layers(run.loaded.model, EMBEDDINGS)
    learn_end(run.samples, run.loaded, said.append, lora=False)
    frozen = f"{why}, and frozen embeddings keep them; train .* or omit --freeze-layers"
    assert bool(re.search(frozen, "\n".join(said))) is tied


def test_a_template_without_a_token_for_the_end_is_noted(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "plain.jinja"
    path.write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    run, notes = load(options_for(folder, CHATS, chat_template=str(path)))
    assert "ends the assistant's turns without a special token" in notes
    assert learned(run, 0) == " It is 2. \nYes!\n"
    assert run.loaded.tokenizer.eos_token == END


def test_a_tokenizer_without_a_template_is_refused(folder: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="has no chat template, and the data are chats") as refused:
        load(options_for(tmp_path, CHATS))
    assert "--chat-template FILE" in str(refused.value.hint)
    load(options_for(tmp_path, PAIRS))


def test_long_samples_are_cut_and_counted(folder: Path) -> None:
    long = [
        {"prompt": "a", "completion": "1 2 3 " * 20},
        {"prompt": "b " * 40, "completion": "c"},
        {"prompt": "d", "completion": "e"},
    ]
    run, notes = load(options_for(folder, long, max_length=16))
    assert (
        "2 of 3 samples are longer than 16 tokens and are cut; 1 without any token to learn are left "
        "out; --max-length keeps more" in notes
    )
    assert [learned(run, n)[:4] for n in range(len(run.samples))] == ["1 2 ", f"e{END}"[:4]]
    assert run.samples.lengths.tolist() == [16, 3]
    with pytest.raises(DatasetError, match="nothing to learn is left of any") as refused:
        load(options_for(folder, long[1:2], max_length=16))
    assert "--max-length" in str(refused.value.hint)


def test_ranks_share_the_rendering(folder: Path) -> None:
    options = options_for(folder, CHATS)
    (one, _), (three, _) = load(options), load(options, ranks=3)
    assert isinstance(one.samples, Masked)
    assert one.samples.digest() == three.samples.digest()
    assert {*one.samples.token_ids().tolist()} == {
        token for n in range(len(CHATS)) for token in one.samples[n].inputs["input_ids"].tolist()
    }
    path = folder / "strict.jinja"
    path.write_text(
        "{% if 'plus 9' in messages[0].content %}{{ messages[0].x.y }}{% endif %}" + CHATML
    )
    strict = replace(options, chat_template=str(path))
    with pytest.raises(DatasetError, match="line 9: the chat template fails"):
        load(strict, ranks=3)
    run, notes = load(replace(strict, skip_bad_records=True), ranks=3)
    assert len(run.samples) == len(CHATS) - 1
    assert "skipped 1 bad record, the first:" in notes


@pytest.mark.parametrize("rows", [PAIRS, CHATS, [{"text": str(row)} for row in PAIRS]])
def test_perplexity_is_that_of_the_learned_tokens(folder: Path, rows: list[dict[str, Any]]) -> None:
    run, _ = load(options_for(folder, rows))

    def work(ranks: Ranks) -> dict[str, Any]:
        context = session(run.context.options, ranks)
        return run.task.evaluate(context, run.loaded, rows, run.samples)

    found, other = run_threaded(2, work)
    assert found == other
    model, losses = AutoModelForCausalLM.from_pretrained(folder).eval(), []
    for number in range(len(run.samples)):
        inputs = run.samples[number].inputs.items()
        tensors = {name: torch.tensor(each)[None].long() for name, each in inputs}
        count = int((tensors["labels"][:, 1:] != IGNORED).sum())
        with torch.no_grad():
            losses.append({"loss": float(model(**tensors).loss), "tokens": count})
    assert found["predictions"] == [
        {**each, "loss": pytest.approx(each["loss"], rel=1e-4)} for each in losses
    ]
    tokens = sum(each["tokens"] for each in losses)
    total = sum(each["loss"] * each["tokens"] for each in losses)
    assert found["eval_tokens"] == tokens
    assert found["perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-4)


def test_a_tokenizers_own_beginning_is_before_a_prompt_and_not_before_a_chat(
    tmp_path: Path,
) -> None:
    """A new model's tokenizer begins each text with [CLS] and ends it with [SEP]."""
    pair, _ = load(options_for(tmp_path, PAIRS, model=SCRATCH))
    tokenizer, ids = pair.loaded.tokenizer, pair.samples[0].inputs["input_ids"]
    assert ids.tolist() == tokenizer(PAIRS[0]["prompt"] + PAIRS[0]["completion"])["input_ids"]
    assert learned(pair, 0).endswith("[SEP]")
    whole, _ = load(options_for(tmp_path, PAIRS, model=SCRATCH, train_on="all"))
    assert tokenizer.decode(ids) == f"[CLS] {learned(whole, 0)}"
    path = tmp_path / "t.jinja"
    path.write_text(CHATML)
    chat, _ = load(options_for(tmp_path, CHATS, model=SCRATCH, chat_template=str(path)))
    assert "[CLS]" not in chat.loaded.tokenizer.decode(chat.samples[0].inputs["input_ids"])


def test_the_memory_of_short_chats_is_not_that_of_long_ones(folder: Path) -> None:
    """The plan takes the longest sample, as padded batches have it."""
    options = options_for(folder, CHATS, max_length=512)
    with patch("jobs.worker.tasks.lm.memory.simulate", return_value=1) as simulated:
        run = load_run(Lm(options))
    assert simulated.call_args.args[0].width == run.samples.lengths.max() < 512
