"""Generation: token by token what transformers gives for each text alone, also with adapters."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoTokenizer,
    BartForCausalLM,
    LlamaForCausalLM,
    MixtralForCausalLM,
    RecurrentGemmaForCausalLM,
)

from jobs.worker.corpus.coordinator import predict_corpus
from jobs.worker.corpus.options import PredictOptions
from jobs.worker.corpus.shards import choose_columns, make_converter
from jobs.worker.data.table import Table
from jobs.worker.runtime.errors import DatasetError, ModelError
from jobs.worker.tasks.adapters import ADAPTERS, load_adapters, merge
from jobs.worker.tasks.lm import generate
from jobs.worker.tasks.lm.generate import encode_prompt
from jobs.worker.tasks.lm.model import LmOptions, add_adapters
from jobs.worker.tasks.lm.task import SHAPE, Lm
from jobs.worker.tasks.predict import load_trained, main, predict
from jobs.worker.training.model import load_pretrained, new_tokenizer, train_tokenizer, write_model
from jobs.worker.training.task import Loaded
from jobs.worker.training.text_task import Row
from tests.jobs.worker.tasks.test_lm import TINY

ONLY = "is for plain texts only"
TEXT = "the first physical core of each socket has eight tiles and a list"
WORDS = TEXT.split()
PROMPTS = [" ".join(WORDS[n % 5 : n % 5 + 1 + n % 7]) for n in range(12)]
ROWS = [{"prompt": text} for text in PROMPTS]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


def write_llama(folder: Path, seed: int = 1, kind: Any = LlamaForCausalLM, **more: Any) -> Path:
    tokenizer = new_tokenizer(train_tokenizer([*WORDS, "user", "assistant"]))
    tokenizer.eos_token = "[SEP]"
    torch.manual_seed(seed)
    shape = {**SHAPE, **TINY, "vocab_size": len(tokenizer), "initializer_range": 0.5, **more}
    model = kind(kind.config_class(**shape))
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids("tiles")
    write_model(folder, Loaded(model, tokenizer))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with clear preferences, whose texts also end after a word."""
    return write_llama(tmp_path_factory.mktemp("llama") / "base")


@pytest.fixture(scope="module")
def chat(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a chat template."""
    target = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(folder, target)
    (target / "chat_template.jinja").write_text(TEMPLATE)
    return target


def write_adapters(base: Path, target: Path) -> Path:
    """Write random adapters that change what the model says."""
    model = LlamaForCausalLM.from_pretrained(base)
    torch.manual_seed(2)
    adapted = add_adapters(model, LmOptions(model=str(base), lora=True))
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)
    write_model(target, Loaded(adapted, AutoTokenizer.from_pretrained(base)))
    return target


@pytest.fixture(scope="module")
def adapters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapters(folder, tmp_path_factory.mktemp("adapters") / "model")


def alone(model: Any, folder: Path, text: str, new: int) -> dict[str, str]:
    """Return what ``generate`` adds to one text."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    ends = [model.generation_config.eos_token_id, tokenizer.eos_token_id]
    with torch.inference_mode():
        asked = {"max_new_tokens": new, "eos_token_id": ends, "pad_token_id": 0}
        mask = torch.ones_like(ids)
        found = model.eval().generate(ids, attention_mask=mask, do_sample=False, **asked)
    added = found[0, ids.shape[1] :].tolist()
    is_over = added[-1] in ends
    kept = added[:-1] if is_over else added
    before, whole = (
        tokenizer.decode(each, skip_special_tokens=True) for each in (ids[0], [*ids[0], *kept])
    )
    reason = "stop" if is_over else "length"
    return {"completion": whole[len(before) :], "finish_reason": reason}


@pytest.fixture(autouse=True)
def processor(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The flags of the processor: at first none, so that models compute in fp32."""
    flags = set[str]()
    monkeypatch.setattr("jobs.worker.runtime.precision.read_cpu_flags", lambda: frozenset(flags))
    return flags


def test_weights_are_halved_where_bf16_is_fast(
    folder: Path, adapters: Path, processor: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "TOGETHER", 1)
    asked = {"max_new_tokens": 6}
    exact = predict(folder, ROWS, asked)
    scores = predict(folder, ROWS[1:], {"perplexity": True})

    processor.add("amx_bf16")

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    half = [alone(model, folder, text, 6) for text in PROMPTS]
    assert predict(folder, ROWS, asked) == half != exact
    assert predict(folder, ROWS[1:], {"perplexity": True}) == scores
    _, loaded = load_trained(str(adapters), asked)
    assert {each.dtype for each in loaded.model.parameters()} == {torch.bfloat16}
    assert len(predict(adapters, ROWS, asked)) == len(ROWS)


def test_texts_of_different_lengths_get_what_each_gets_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "TOGETHER", 5)
    found = predict(folder, ROWS, {"max_new_tokens": 9})
    model = LlamaForCausalLM.from_pretrained(folder)
    assert found == [alone(model, folder, text, 9) for text in PROMPTS]
    assert {each["finish_reason"] for each in found} == {"stop", "length"}
    assert len({each["completion"] for each in found}) > 6


RECURRENT = {"lru_width": 32, "attention_window_size": 8, "num_hidden_layers": 3, "head_dim": 8}
BART = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 32}


@pytest.mark.parametrize(
    ("kind", "shape"), [(RecurrentGemmaForCausalLM, RECURRENT), (BartForCausalLM, BART)]
)
def test_models_that_ignore_the_mask_or_count_padding_read_none(
    tmp_path: Path, kind: Any, shape: dict[str, int]
) -> None:
    folder = write_llama(tmp_path / "model", kind=kind, **shape)
    model = kind.from_pretrained(folder)
    torch.manual_seed(3)
    for weight in model.parameters():  # new biases, and the vector of padding, are 0
        torch.nn.init.normal_(weight, std=0.5)
    model.save_pretrained(folder)
    asked = {"max_new_tokens": 4}
    together = predict(folder, ROWS[:5], asked)
    assert together == [predict(folder, [row], asked)[0] for row in ROWS[:5]]


def test_long_texts_get_what_fits_into_the_model(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "short", max_position_embeddings=16)
    texts = ["the " * 14, "core", "the " * 10, "first core"]
    found = predict(folder, [{"prompt": text} for text in texts], {"max_new_tokens": 12})
    model = LlamaForCausalLM.from_pretrained(folder)
    assert found == [
        alone(model, folder, *each) for each in zip(texts, (2, 12, 6, 12), strict=True)
    ]
    with pytest.raises(DatasetError, match="row 2: has 16 tokens, and the model takes 16 with the"):
        predict(folder, [{"prompt": "the"}, {"prompt": "the " * 16}])
    with pytest.raises(DatasetError, match="row 2: has no tokens to continue"):
        predict(folder, [{"prompt": "the"}, {"prompt": "\u200b"}])


def test_the_loss_of_routers_is_not_computed(tmp_path: Path) -> None:
    """Saved with the setting, as after fine-tuning a mixture of experts."""
    found = []
    for name, more in (("plain", {}), ("tuned", {"output_router_logits": True})):
        experts = {"kind": MixtralForCausalLM, "num_local_experts": 2, **more}
        found.append(predict(write_llama(tmp_path / name, **experts), ROWS, {"max_new_tokens": 4}))
    assert found[0] == found[1]


def test_random_texts_depend_on_the_seed_only(folder: Path) -> None:
    def draw(**settings: Any) -> list[dict[str, Any]]:
        return predict(folder, ROWS, {"max_new_tokens": 8, **settings})

    before = torch.get_rng_state()
    one = draw(temperature=2.0, top_p=0.9, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(9)
    assert draw(temperature=2.0, top_p=0.9, seed=1) == one
    assert draw(temperature=2.0, top_p=0.9, seed=2) != one != draw()
    # Equal texts are drawn in different ways, also in other batches.
    same = [{"prompt": "the first core"}] * 64
    found = predict(folder, same, {"max_new_tokens": 8, "temperature": 2.0})
    assert found[:32] != found[32:]
    # So hot, all tokens are alike, and more are drawn than the 50 that transformers would take.
    hot = predict(folder, same * 4, {"max_new_tokens": 1, "temperature": 1e6})
    assert len({each["completion"] for each in hot}) > 50
    # Only the likeliest token has so little probability, or so low a temperature.
    assert draw(temperature=2.0, top_p=1e-6) == draw(temperature=1e-4) == draw()


def test_a_chat_is_answered_with_the_saved_template(folder: Path, chat: Path) -> None:
    turns = [
        {"role": "user", "content": "the core"},
        {"role": "assistant", "content": "of each"},
        {"role": "user", "content": "socket"},
    ]
    reference = {"role": "assistant", "content": "tiles"}
    with pytest.raises(DatasetError, match="row 1: the model has no chat template for messages"):
        predict(folder, [{"messages": turns}])
    assert predict(folder, [{"text": "the core"}]) == predict(folder, [{"prompt": "the core"}])

    def ask(row: Mapping[str, Any]) -> dict[str, Any]:
        (found,) = predict(chat, [row], {"max_new_tokens": 9})
        return found

    plain = ask({"prompt": "user the core assistant of each user socket assistant"})
    assert ask({"messages": turns}) == ask({"messages": [*turns, reference]}) == plain
    assert ask({"prompt": turns}) == plain
    # A text of the command line is a turn; a prompt is continued as it is.
    assert ask({"text": "the core"}) == ask({"prompt": "user the core assistant"})
    assert ask({"text": "the core"}) != ask({"prompt": "the core"})
    for messages, message in (
        ([reference], "row 1: 'messages' has no turn to answer"),
        (["x"], "row 1: 'messages', turn 1 has no role and content"),
        ([{"role": "tool", "content": "x"}], "row 1: the chat template fails: no tools"),
    ):
        with pytest.raises(DatasetError, match=message):
            ask({"messages": messages})


def test_files_have_texts_prompts_or_chats(folder: Path, chat: Path, tmp_path: Path) -> None:
    direct = predict(folder, ROWS, {"max_new_tokens": 4})
    chats = [[{"role": "user", "content": text}] for text in PROMPTS]
    answers = predict(chat, [{"messages": each} for each in chats], {"max_new_tokens": 4})
    for name, values, expected in (
        ("text", PROMPTS, direct),
        ("prompt", PROMPTS, direct),
        ("messages", chats, answers),
    ):
        rows = [{name: value, "completion": "known"} for value in values]
        (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        data, output = (str(tmp_path / each) for each in ("in.jsonl", "out.jsonl"))
        options = PredictOptions(str(chat), data, output, settings={"max_new_tokens": 4})
        predict_corpus(replace(options, parts=str(tmp_path / "parts")), lambda _: None)
        found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        names = {"completion": "predicted_completion", "finish_reason": "finish_reason"}
        assert [{own: each[name] for own, name in names.items()} for each in found] == expected
        assert [{key: each[key] for key in rows[0]} for each in found] == rows
        # A text's perplexity; of prompts and chats, a part would be left out.
        parts, refused = str(tmp_path / f"parts-{name}"), pytest.raises(DatasetError, match=ONLY)
        with nullcontext() if name == "text" else refused:
            measured = replace(options, settings={"perplexity": True}, parts=parts)
            predict_corpus(measured, lambda _: None)
    with pytest.raises(DatasetError, match="row 1: 'prompt' is a chat, and --perplexity"):
        predict(chat, [{"prompt": chats[0]}], {"perplexity": True})


def test_prompts_begin_as_in_training(folder: Path) -> None:
    """Prompts with completions are learned after the mark of a beginning, plain texts without."""
    model = LlamaForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    begin, core = tokenizer.convert_tokens_to_ids(["[CLS]", "core"])

    def encode(tokenizer: Any, **columns: str) -> list[int]:
        model.config.data_columns = columns
        return [*encode_prompt(Loaded(model, tokenizer), Row("row 1", {"prompt": "core"}))]

    assert encode(tokenizer, text="text") == [core]
    assert encode(tokenizer, prompt="question") == [begin, core]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapters_are_applied_as_peft_does(
    folder: Path, adapters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import AutoPeftModelForCausalLM

    asked = {"max_new_tokens": 8}
    found = predict(adapters, ROWS, asked)
    assert found != predict(folder, ROWS, asked)
    theirs = AutoPeftModelForCausalLM.from_pretrained(adapters)
    assert found == [alone(theirs, folder, text, 8) for text in PROMPTS]

    # On a node, the base is elsewhere.
    config = json.loads((adapters / ADAPTERS).read_text())
    moved = tmp_path / "moved"
    shutil.copytree(adapters, moved)
    (moved / ADAPTERS).write_text(json.dumps({**config, "base_model_name_or_path": "/gone"}))
    assert predict(moved, ROWS, asked, str(folder)) == found
    with pytest.raises(ModelError, match=f"{moved}: its adapters belong to the model in /gone"):
        predict(moved, ROWS, asked)

    target = tmp_path / "whole"
    assert main(["--merge", str(target), "--base", str(folder), str(moved)]) == 0
    assert predict(target, ROWS, asked) == found
    whole = LlamaForCausalLM.from_pretrained(target)
    ends = [
        theirs.generation_config.eos_token_id,
        AutoTokenizer.from_pretrained(adapters).eos_token_id,
    ]
    assert sorted(whole.generation_config.eos_token_id) == sorted(ends)
    assert main(["--merge", str(target), str(moved)]) == 1
    assert "predict: error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "kept"),
    [
        ({"temperature": 0.9, "top_p": 0.6}, True),
        ({"temperature": 0.0, "do_sample": False}, True),
        ({"temperature": 0.9, "do_sample": True}, True),
        ({"temperature": 0.9, "length_penalty": 0.5}, False),
    ],
)
def test_a_model_is_saved_whose_generation_config_transformers_refuses(
    folder: Path, tmp_path: Path, more: Mapping[str, Any], kept: bool
) -> None:
    """Vicuna's has a temperature without sampling. A greedy model stays one."""
    base = tmp_path / "base"
    shutil.copytree(folder, base)
    path = base / "generation_config.json"
    known = json.loads(path.read_text())
    path.write_text(json.dumps({**known, "repetition_penalty": 1.5, **more}))
    names = ["model"]
    if not kept:
        merge(str(write_adapters(base, tmp_path / "adapters")), tmp_path / "whole")
        names.append("whole")
    loaded = load_pretrained(str(base), "CausalLM")
    loaded.model.generation_config.eos_token_id = [1, 2]  # as after chats
    write_model(tmp_path / "model", loaded)
    for name in names:
        model = load_pretrained(str(tmp_path / name), "CausalLM").model
        saved, samples = model.generation_config, more.get("do_sample", False)
        assert len(saved.eos_token_id) == 2
        assert (saved.repetition_penalty == 1.5) is kept
        assert bool(saved.do_sample) == (saved.temperature == 0.9) == samples
        assert model.generate(torch.tensor([[5, 6]]), max_new_tokens=2).shape[0] == 1


def test_a_merged_model_has_the_type_of_its_base(
    adapters: Path, folder: Path, tmp_path: Path
) -> None:
    """Merged in fp32: in bf16, rounding would lose most of small changes."""
    half = tmp_path / "half"
    base = LlamaForCausalLM.from_pretrained(folder).bfloat16()
    write_model(half, Loaded(base, AutoTokenizer.from_pretrained(folder)))
    merge(str(adapters), tmp_path / "whole", str(half))
    found = LlamaForCausalLM.from_pretrained(tmp_path / "whole", dtype="auto").state_dict()
    assert {each.dtype for each in found.values()} == {torch.bfloat16}
    exact = load_adapters(str(adapters), str(half)).model.merge_and_unload().state_dict()
    assert all(torch.equal(found[name], exact[name].bfloat16()) for name in found)


NO_BASE = '{"task_type": "CAUSAL_LM", "base_model_name_or_path": null}'


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("adapter_model.safetensors", "", "can't be loaded: "),
        ("tokenizer.json", "{}", "can't be loaded: "),
        (ADAPTERS, NO_BASE, "base_model_name_or_path is None"),
        ("", "", "has no adapter_model.safetensors"),
    ],
)
def test_adapters_that_are_unusable_are_a_line(
    adapters: Path, tmp_path: Path, file: str, content: str, message: str
) -> None:
    folder = shutil.copytree(adapters, tmp_path / "model")
    (folder / (file or "other")).write_text(content)
    if not file:
        (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match=re.escape(message)) as caught:
        load_adapters(str(folder))
    assert "\n" not in caught.value.message


def test_a_models_own_code_never_runs(folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(folder, own)
    config = json.loads((own / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "evil.Config"}}
    (own / "config.json").write_text(json.dumps(config))
    mark = tmp_path / "ran"
    (own / "evil.py").write_text(f"open({str(mark)!r}, 'w')\n")

    with pytest.raises(ModelError, match="can't be loaded"):
        load_pretrained(str(own), "CausalLM")
    assert not mark.exists()


def test_the_column_of_training_comes_first_and_a_second_text_is_refused() -> None:
    table = Table("a.csv", ("text", "question", "messages"), [])
    chosen = [choose_columns(Lm, table, {}, trained) for trained in ({"prompt": "question"}, {})]
    assert chosen == [{"text": "question"}, {"text": "text"}]
    with pytest.raises(DatasetError, match="--pair-column: a model of `train lm` reads text"):
        choose_columns(Lm, table, {"pair": "question"}, {})


@pytest.mark.parametrize("tools", [None, [{"name": "add"}]])
def test_a_chat_of_a_file_has_its_tools(chat: Path, tools: Any) -> None:
    row = {"messages": [{"role": "user", "content": "core"}], "tools": tools, "id": 1}
    convert = make_converter(Lm, Table("a.jsonl", (*row,), []), PredictOptions(str(chat), "", ""))
    _, asked = convert("a.jsonl: line 1", row)
    assert asked.values == {key: row[key] for key in ("messages", "tools") if row[key]}
    tokenizer = AutoTokenizer.from_pretrained(chat)
    tokenizer.chat_template = "{% for tool in tools or () %}list {% endfor %}" + TEMPLATE
    found = tokenizer.decode(encode_prompt(Loaded(None, tokenizer), asked))
    assert found == "list " * bool(tools) + "user core assistant"
