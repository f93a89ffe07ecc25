"""peft's adapters as models: applied to the model that they belong to, or merged into it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any
from warnings import catch_warnings, simplefilter

from ..runtime.errors import ModelError, first_line
from .lm.model import import_peft

if TYPE_CHECKING:
    from ..training.task import Loaded

ADAPTERS = "adapter_config.json"


def read_adapters(folder: str | Path) -> str:
    """Return the name of the model that adapters belong to. Raises :class:`ModelError`."""
    path = Path(folder, ADAPTERS)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        base, kind = config["base_model_name_or_path"], config["task_type"]
        if not isinstance(base, str):
            raise TypeError(f"base_model_name_or_path is {base!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path}: can't be read: {error!r}") from None
    if kind != "CAUSAL_LM":
        raise ModelError(f"{path}: has adapters for {kind}, not those of `train lm`")
    return base


def is_folder(base: str) -> bool:
    """Return whether adapters name their model by its folder."""
    return base.startswith(("/", "./", "../", "~")) or Path(base).is_dir()


def require_base(folder: str | Path, base: str) -> None:
    """Raise :class:`ModelError` if the model's folder is gone."""
    if is_folder(base) and not Path(base).expanduser().is_dir():
        raise ModelError(
            f"{folder}: its adapters belong to the model in {base}, which does not exist",
            hint=f"put it there, or correct base_model_name_or_path in {Path(folder, ADAPTERS)}",
        )


def load_adapters(folder: str, place: str = "", dtype: str | None = None) -> Loaded:
    """Return a model with its adapters, and the tokenizer beside those. Raises :class:`ModelError`.

    ``place`` is the model's folder, if there is one, instead of the place that the adapters name. The model's
    weights are converted to fp32, or loaded in ``dtype``.
    """
    from transformers import AutoTokenizer

    from ..training.model import load_pretrained

    base = read_adapters(folder)
    if place and Path(place).is_dir():
        base = place
    require_base(folder, base)
    peft = import_peft("adapters need peft")
    if not any(Path(folder).glob("adapter_model.*")):
        raise ModelError(f"{folder}: has no adapter_model.safetensors, only its configuration")
    loaded = load_pretrained(base, "CausalLM", dtype=dtype)
    try:
        with catch_warnings():
            # peft asks for a name that transformers has replaced.
            simplefilter("ignore", FutureWarning)
            model = peft.PeftModel.from_pretrained(loaded.model, folder)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    # The library raises what torch, safetensors, and the hub's client do.
    except Exception as error:
        raise ModelError(
            f"the adapters in {folder} can't be loaded: {first_line(error)}"
        ) from error
    return loaded._replace(model=model, tokenizer=tokenizer)


def merge(folder: str, target: Path, place: str = "") -> None:
    """Write a whole model: adapters, merged in fp32 into theirs, in the type of its files.

    Raises :class:`ModelError`.
    """
    from safetensors import SafetensorError

    from ..training.model import write_model
    from .lm.generate import find_ends

    loaded = load_adapters(folder, place)
    kind: Any = loaded.model.config.dtype
    model = loaded.model.merge_and_unload()
    # Adapters of chats have their own end in the tokenizer.
    model.generation_config.eos_token_id = find_ends(loaded)
    try:
        write_model(target, loaded._replace(model=model.to(kind) if kind else model))
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{target} can't be written: {first_line(error)}") from error
