"""Language models: their loss, their samples, adapters, and the memory they need."""

from __future__ import annotations

import io
import json
import shutil
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
)

from jobs.worker.data.readers import read_table
from jobs.worker.fast import int8
from jobs.worker.runtime.errors import DatasetError, ModelError
from jobs.worker.runtime.ranks import join
from jobs.worker.tasks.lm import head, memory
from jobs.worker.tasks.lm.generate import encode_text
from jobs.worker.tasks.lm.head import IGNORED, ChunkedLoss, use_chunks
from jobs.worker.tasks.lm.memory import ADAM_BYTES, LiveBytes, Plan, read_free_bytes, simulate
from jobs.worker.tasks.lm.model import LmOptions, add_adapters
from jobs.worker.tasks.lm.samples import Packed
from jobs.worker.tasks.lm.task import SHAPE, Lm, perplexity
from jobs.worker.tasks.predict import load_trained, predict, predict_rows
from jobs.worker.training.batches import Schedule, TrainingRun, batches
from jobs.worker.training.checkpoints import list_checkpoints
from jobs.worker.training.model import (
    load_pretrained,
    new_tokenizer,
    save_model,
    train_tokenizer,
)
from jobs.worker.training.optimizer_step import prepare, take_step
from jobs.worker.training.options import BASE_MODEL, NO_CACHE
from jobs.worker.training.task import Loaded
from jobs.worker.training.text_task import Row
from tests.jobs.worker.forked_ranks import run_forked
from tests.jobs.worker.threaded_ranks import load_run

SAMPLE = str(Lm.demo.data)
TINY: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small pretrained model: as good as random."""
    path = tmp_path_factory.mktemp("llama")
    texts = [row["text"] for row in read_table(SAMPLE).rows]
    tokenizer = new_tokenizer(train_tokenizer(texts))
    tokenizer.eos_token = "[SEP]"
    torch.manual_seed(1)
    config = LlamaConfig(**{**SHAPE, **TINY, "vocab_size": len(tokenizer)})
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def options_for(folder: Path, **more: Any) -> LmOptions:
    chosen = {"model": str(folder), "token_cache": NO_CACHE, "learning_rate": 1e-2}
    chosen |= {"warmup_ratio": 0.0, "compile": "off", "max_length": 32, "batch_size": 4}
    return replace(Lm.demo, **{**chosen, **more})


def load(options: LmOptions) -> TrainingRun:
    """Return a run of one rank, before its first step."""
    with patch("jobs.worker.tasks.lm.memory.require_memory"):  # which takes most of the time
        return load_run(Lm(options))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("dtype", "exact"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_the_loss_in_chunks_is_that_of_all_logits(
    dtype: torch.dtype, exact: float, frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "CHUNK", 350)
    monkeypatch.setattr(head, "LEAST_ROWS", 1)
    monkeypatch.setattr(head, "BLOCK_ROWS", 1)
    torch.manual_seed(1)
    labels = torch.randint(0, 50, (30,))
    labels[[3, 29]] = IGNORED
    hidden, weight = torch.randn(30, 8), torch.randn(50, 8)
    found, expected = list[Any](), list[Any]()
    for results, kind in ((found, dtype), (expected, torch.float64)):
        one, other = (each.detach().to(kind, copy=True) for each in (hidden, weight))
        one.requires_grad_()
        other.requires_grad_(not frozen)
        if kind is torch.float64:
            loss = cross_entropy(one @ other.t(), labels, ignore_index=IGNORED)
        else:
            loss = ChunkedLoss.apply(one, other, labels)  # type: ignore[no-untyped-call]
        (3 * loss).backward()  # type: ignore[no-untyped-call]
        assert frozen == (other.grad is None)
        results += [loss.detach(), one.grad, *([] if frozen else [other.grad])]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine is not None
        assert theirs is not None
        assert float((mine.double() - theirs).norm() / theirs.norm()) < exact


def test_models_that_change_logits_keep_their_own_loss() -> None:
    capped = Gemma2ForCausalLM(Gemma2Config(**TINY, head_dim=8, final_logit_softcapping=30.0))
    free = Gemma2ForCausalLM(Gemma2Config(**TINY, head_dim=8, final_logit_softcapping=None))
    biased: Any = LlamaForCausalLM(LlamaConfig(**TINY))
    biased.lm_head = nn.Linear(32, 99, bias=True)
    assert [use_chunks(each) for each in (capped, free, biased)] == [False, True, False]
    assert "forward" not in vars(capped.lm_head)


def test_limited_scores_of_attention_are_limited(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused attention, the default of transformers 4 for Gemma 2, has no limit."""
    from transformers import AutoTokenizer

    monkeypatch.setattr("transformers.Gemma2PreTrainedModel._supports_sdpa", True)
    config = Gemma2Config(**TINY, head_dim=8, attn_logit_softcapping=0.1, initializer_range=0.5)
    config.vocab_size = len(tokenizer := AutoTokenizer.from_pretrained(folder))
    save_model(tmp_path, Loaded(Gemma2ForCausalLM(config), tokenizer))
    path, ids = str(tmp_path / "model"), torch.arange(20)[None]
    found = load_pretrained(path, "CausalLM").model
    eager = Gemma2ForCausalLM.from_pretrained(path, attn_implementation="eager").float()
    assert torch.equal(found.eval()(ids).logits, eager.eval()(ids).logits)
    plan = Plan(LmOptions(max_length=512, batch_size=2), "fp32", 1)
    without = Gemma2Config(**TINY, head_dim=8, attn_logit_softcapping=None)
    scores = 2 * 4 * 512 * 512 * 4  # bytes of one layer
    limited = Gemma2Config(**TINY, head_dim=8)
    assert simulate(plan, limited) > simulate(plan, without) + 2 * scores


@pytest.mark.parametrize("begin", [[], ["[CLS]"], ["[CLS]", "[MASK]"]])
def test_texts_are_packed_without_a_gap(folder: Path, tmp_path: Path, begin: list[str]) -> None:
    tokenizer = load_pretrained(str(folder), "CausalLM").tokenizer
    if begin:  # as Llama's and Gemma's tokenizers write BOS
        marks = [(each, tokenizer.convert_tokens_to_ids(each)) for each in begin]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=[*begin, "$A"], pair=[*begin, "$A", "$B"], special_tokens=marks
        )
        shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
        tokenizer.save_pretrained(tmp_path)
    run = load(options_for(tmp_path if begin else folder))
    samples, tokenizer = run.samples, run.loaded.tokenizer
    assert isinstance(samples, Packed)
    joined = [token for n in range(len(samples)) for token in samples[n].inputs["input_ids"]]
    texts = [row["text"] for row in read_table(SAMPLE).rows]
    expected: list[int] = []
    for text in texts:
        own = tokenizer(text, add_special_tokens=bool(begin))["input_ids"]
        assert encode_text(run.loaded, text) == own
        expected += [*own, tokenizer.eos_token_id]
    assert joined == expected
    assert {*samples.token_ids().tolist()} == {*expected}
    assert {*samples.lengths[:-1]} == {32}
    weights = run.task.weights(samples)
    assert weights is not None
    # As in `predict --perplexity`, a text's beginning is not predicted.
    labels = [token for n in range(len(samples)) for token in samples[n].inputs["labels"]]
    before = {*tokenizer.convert_tokens_to_ids(begin)}
    assert labels == [IGNORED if token in before else token for token in joined]
    counted = [label != IGNORED for n, label in enumerate(labels) if n % 32]
    assert int(weights.sum()) == sum(counted)
    assert weights[0] == sum(counted[:31])


def test_a_last_sample_of_one_token_is_left_out(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a\n" * 32)
    assert load(options_for(folder, data=str(path))).samples.lengths.tolist() == [32]


def test_predict_measures_each_text(folder: Path) -> None:
    rows = [{"text": "a core"}, {"text": "The scheduler keeps a list of jobs."}]
    found = predict(folder, rows, {"perplexity": True})
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    tokenizer = load(options_for(folder)).loaded.tokenizer
    for row, each in zip(rows, found, strict=True):
        text = tokenizer(row["text"], add_special_tokens=False)["input_ids"]
        ids = torch.tensor([[*text, tokenizer.eos_token_id]])  # as it is learned
        with torch.no_grad():
            loss = float(model(input_ids=ids, labels=ids).loss)
        assert each == {
            "perplexity": pytest.approx(perplexity(loss), rel=1e-3),
            "tokens": ids.numel(),
        }
    for odd, why in (({"text": ""}, "'text' is empty"), ("a", "'text' is not a text")):
        with pytest.raises(DatasetError, match=f"row 1: {why}"):
            predict(folder, [odd], {"perplexity": True})  # type: ignore[list-item]


def test_texts_beyond_the_longest_input_are_counted(folder: Path) -> None:
    task, loaded = load_trained(str(folder), {"perplexity": True})
    loaded.model.config.max_position_embeddings = limit = 64
    loaded = loaded._replace(cut=Counter())
    texts = ("core core", "core " * 2 * limit, "core " * 3 * limit, "")
    *found, empty = predict_rows(task, loaded, [Row("row", {"text": text}) for text in texts])
    assert [each["tokens"] for each in found if isinstance(each, dict)][1:] == [limit, limit]
    assert empty == "row: 'text' is empty"
    assert loaded.cut == {limit: 2}


@pytest.mark.parametrize("base", ["/home/me/base", None])
def test_adapters_name_the_base_as_the_user_does(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str | None
) -> None:
    if base:
        monkeypatch.setenv(BASE_MODEL, base)
    save_model(tmp_path, load(options_for(folder, lora=True)).loaded)
    config = json.loads((tmp_path / "model/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == (base or str(folder))


def test_adapters_of_mamba_leave_out_what_peft_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    config = MambaConfig(vocab_size=99, hidden_size=32, state_size=8, num_hidden_layers=1)
    adapted = add_adapters(MambaForCausalLM(config), LmOptions(lora=True))
    names = " ".join(name for name, each in adapted.named_parameters() if each.requires_grad)
    assert "in_proj" in names
    assert "out_proj" not in names
    monkeypatch.setattr("jobs.worker.tasks.lm.model.MAMBAS", {})
    with pytest.raises(ModelError, match=r"can't have adapters: .*'out_proj' is incom") as refused:
        add_adapters(MambaForCausalLM(config), LmOptions(lora=True))
    assert refused.value.hint == "omit --lora"


@pytest.mark.filterwarnings("ignore")  # Trainer's
def test_adapters_learn_as_with_peft_and_trainer(folder: Path, tmp_path: Path) -> None:
    """Twenty steps in fp32 have the same losses."""
    from peft import LoraConfig, get_peft_model
    from torch.utils.data import SequentialSampler
    from transformers import AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

    steps, run = 20, load(options_for(folder, lora=True))
    whole = (run.samples[n].inputs["input_ids"].tolist() for n in range(len(run.samples)))
    known = [{"input_ids": each, "labels": each} for each in whole]
    per_epoch = (len(run.samples) - 1) // 4  # full batches
    schedule = Schedule(per_epoch, steps, 0)
    order = list(batches(run.context, run.samples.lengths[: 4 * per_epoch], schedule))
    base = LlamaForCausalLM.from_pretrained(folder)
    theirs = get_peft_model(
        base, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    missing = theirs.load_state_dict(run.loaded.model.state_dict())
    assert not missing.missing_keys
    rows = [known[int(n)] for each in order for n in each]
    padding = AutoTokenizer.from_pretrained(folder)
    padding.pad_token = padding.eos_token
    losses: list[float] = []

    class Recording(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(rows)

        def training_step(self, *arguments: Any, **options: Any) -> Any:
            loss = super().training_step(*arguments, **options)
            losses.append(float(loss))
            return loss

    shared: dict[str, Any] = {"output_dir": str(tmp_path), "use_cpu": True, "disable_tqdm": True}
    shared |= {"per_device_train_batch_size": 4, "max_steps": steps, "learning_rate": 1e-2}
    arguments = TrainingArguments(report_to=[], save_strategy="no", **shared)
    collator = DataCollatorForSeq2Seq(padding)
    Recording(theirs, arguments, collator, train_dataset=rows).train()

    found = []
    with join("gloo", {}):
        model, optimizer = prepare(run, steps)
        for number, chosen in enumerate(order):
            optimizer.param_groups[0]["lr"] = 1e-2 * schedule.rate(number)
            found.append(take_step(run, model, optimizer, run.batch(chosen)).loss)
    assert len(found) == len(losses) == steps
    assert found == pytest.approx(losses, abs=1e-5)
    assert found[-1] < found[0] - 0.05


def test_adapters_are_all_that_a_checkpoint_holds(folder: Path, nodes_folder: Path) -> None:
    """A killed run with recomputed layers continues to the same adapters, to the bit."""
    shared: dict[str, Any] = {"lora": True, "gradient_checkpointing": True, "batch_size": 2}
    shared |= {"max_steps": 6, "checkpoint_every": 2, "backend": "gloo", "dtype": "bf16"}

    def at(name: str, **more: Any) -> LmOptions:
        return options_for(folder, **shared, output=str(nodes_folder / name), **more)

    kill, alone = {"at": "step", "step": 4, "signal": signal.SIGKILL}, {"ranks": 1}
    whole, killed, resumed = run_forked(
        [(at("whole"), alone), (at("killed"), kill | alone), (at("killed", resume=True), alone)]
    )
    assert (whole.codes, resumed.codes) == ([0], [0]), resumed.texts
    assert -signal.SIGKILL in killed.codes
    one, other = (
        (nodes_folder / name / "model" / "adapter_model.safetensors").read_bytes()
        for name in ("whole", "killed")
    )
    assert one == other
    state = torch.load(list_checkpoints(nodes_folder / "whole")[-1] / "state.pt")
    assert state["model"]
    assert all("lora_" in name for name in state["model"])
    notes = [event["text"] for event in whole.of("note")]
    assert any("of memory per rank" in note for note in notes)


def test_adapters_get_a_higher_default_rate() -> None:
    full, lora = LmOptions(), LmOptions(lora=True)
    assert lora.highest_rate(1) == pytest.approx(10 * full.highest_rate(1))
    assert [each.highest_rate(32) for each in (full, lora)] == pytest.approx([2e-4, 5e-4])
    assert LmOptions(lora=True, learning_rate=1e-3).highest_rate(2) == 1e-3


def test_layers_are_recomputed_without_dropout() -> None:
    from jobs.worker.tasks.lm.model import has_dropout, prepare_model

    model = GPT2LMHeadModel(GPT2Config(vocab_size=99, n_embd=16, n_layer=2, n_head=2))
    assert has_dropout(model)
    model = prepare_model(model, LmOptions(gradient_checkpointing=True)).train()
    assert not has_dropout(model)
    assert model.is_activation_checkpointing


def peak(**more: Any) -> int:
    config = LlamaConfig(**{**TINY, "hidden_size": 64})
    with patch.object(head, "BLOCK_ROWS", 256):  # fewer operations to simulate
        return simulate(Plan(LmOptions(max_length=128, **more), "fp32", 1), config)


def test_the_simulated_peak_falls_with_what_saves_memory() -> None:
    torch.manual_seed(4)
    before = torch.get_rng_state()
    full = peak()
    assert torch.equal(torch.get_rng_state(), before)
    recomputed = peak(gradient_checkpointing=True)
    assert recomputed < 0.7 * full
    assert peak(accumulate=8) < 0.3 * full
    assert peak(batch_size=16) > 1.8 * full
    assert peak(lora=True, gradient_checkpointing=True) < recomputed


def test_a_simulated_step_in_int8_holds_a_frozen_weight_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {"lora": True, "batch_size": 1, "gradient_checkpointing": True}
    plain = peak(**options)
    # In two layers, query and output have 64 inputs and outputs: a byte for each weight, and scales.
    for least, more in ((64, 2 * 2 * 64 * (64 + 4)), (65, 0)):
        monkeypatch.setattr(int8, "LEAST_SIZE", least)
        assert peak(dtype="int8", **options) - plain == more


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**TINY),
        Gemma2Config(**TINY, head_dim=8),
        FalconConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
        MixtralConfig(**TINY, num_local_experts=4),
    ],
    ids=lambda config: config.model_type,
)
def test_the_simulated_peak_is_that_of_a_step(config: Any) -> None:
    options = LmOptions(max_length=64, batch_size=2)
    found = simulate(Plan(options, "fp32", 1), config)
    own = AutoModelForCausalLM.from_config(config).train()
    use_chunks(own)
    ids, live = torch.zeros((2, 64), dtype=torch.int64), LiveBytes()
    with live:
        live.add(*own.parameters(), *own.buffers())
        own(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    weights = sum(each.numel() for each in own.parameters())
    assert found - ADAM_BYTES * weights == pytest.approx(live.peak, rel=0.02)
    if config.model_type == "llama":
        # With evaluation data, also the best weights so far.
        for keep, more in (("best", 4 * weights), ("last", 0)):
            evaluated = replace(options, eval="dev.txt", keep=keep)
            assert simulate(Plan(evaluated, "fp32", 1), config) == found + more


def test_a_simulation_that_fails_is_a_note_with_its_type(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "simulate", Mock(side_effect=KeyError("planned")))
    said = io.StringIO()
    load_run(Lm(options_for(folder)), 1, said)
    assert "the memory it needs is not known: KeyError: 'planned'" in said.getvalue()


def test_a_run_that_can_not_fit_is_refused_before_it_loads(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "read_free_bytes", lambda: 1000)
    with pytest.raises(ModelError) as refused:
        load_run(Lm(options_for(folder, lora=True)))
    assert "of memory per rank, and rank 0 can have" in refused.value.message
    assert refused.value.hint is not None
    assert "--gradient-checkpointing, --accumulate 2, " in refused.value.hint
    assert "--lora" not in refused.value.hint


STAT = "inactive_file 40\ntotal_inactive_file 7"
"""Of the second and of the first version of control groups."""
OLD = ("memory.limit_in_bytes", "memory.usage_in_bytes")


@pytest.mark.parametrize(
    ("line", "folder", "limit", "names", "expected"),
    [
        ("0::/", "", "500", ("memory.max", "memory.current"), 240),
        ("0::/a/b", "a", "max", ("memory.max", "memory.current"), None),
        ("7:cpu,memory:/a", "memory", "500", OLD, 207),
    ],
)
def test_the_memory_left_is_that_of_the_control_group(
    tmp_path: Path, line: str, folder: str, limit: str, names: tuple[str, str], expected: int | None
) -> None:
    (tmp_path / "cgroup").write_text(f"3:cpuset:/x\n{line}\n")
    own = tmp_path / "fs" / folder
    own.mkdir(parents=True)
    for name, content in zip((*names, "memory.stat"), (limit, "300", STAT), strict=True):
        (own / name).write_text(content + "\n")
    found = read_free_bytes(tmp_path / "cgroup", tmp_path / "fs")
    assert found == expected if expected is not None else found > 10**7


def test_loaded_without_an_end_token_is_refused(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    LlamaForCausalLM.from_pretrained(folder).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="no token for the end of a text"):
        load(options_for(tmp_path))
