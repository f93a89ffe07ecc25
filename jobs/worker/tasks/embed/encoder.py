"""The model of `train embed`: one encoder for all columns of texts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from ...runtime.errors import ModelError

if TYPE_CHECKING:
    from ...training.state import TrainContext

_MODULES = "modules.json"
_SENTENCE_TRANSFORMERS: dict[str, Any] = {
    _MODULES: [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (path, kind) in enumerate(
            [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
        )
    ],
    "2_Normalize/config.json": {},
}
"""Files with which sentence-transformers computes the same vectors."""


Declared = dict[str, Any]
_POOLING, _SETTINGS = "1_Pooling/config.json", "config_sentence_transformers.json"
_MODES = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}


def read_declared(model: str, context: TrainContext | None = None) -> Declared:
    """Return the modules, pooling, and prompts that a sentence-transformers model declares, by file.

    With a context, rank 0 reads and shares them. ``model`` is a folder, a name on the hub, or "" for a new
    one. Raises :class:`ModelError`.
    """
    from huggingface_hub import try_to_load_from_cache
    from transformers.utils import cached_file

    found: Declared = {}
    for name in (_MODULES, _POOLING, _SETTINGS) if context is None or context.ranks.first else ():
        path = model and cached_file(
            model,
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        try:
            found[name] = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
        except ValueError as error:
            raise ModelError(f"model {model}: {name} is not JSON: {error}") from None
    paths = [each.get("path") for each in found.get(_MODULES, ())]
    if "1_Pooling" in paths and not found[_POOLING] and Path(model).is_dir():
        raise ModelError(
            f"model {model}: {_POOLING} is missing, which {_MODULES} names",
            hint="copy the whole folder, with its subfolders",
        )
    if context is None:
        return found
    # The cache also knows which files a model lacks.
    is_known = not model or Path(model).is_dir() or try_to_load_from_cache(model, _POOLING)
    if not is_known:
        context.events.note(f"model {model}: {_POOLING} can't be read; using mean pooling")
    shared: Declared = context.ranks.share(found)
    return shared


def find_pooling(declared: Declared) -> str:
    """Return "mean" or "cls". Raises :class:`ModelError` for another pooling, and for other modules."""
    kinds = [str(each["type"]).rpartition(".")[2] for each in declared[_MODULES]]
    if others := {*kinds} - {"Transformer", "Pooling", "Normalize"}:
        raise ModelError(
            f"the model also has {', '.join(sorted(others))} of sentence-transformers; "
            "`embed` has only Transformer, Pooling, and Normalize"
        )
    pooling = declared[_POOLING]
    old = [name for name, value in pooling.items() if name.startswith("pooling_mode_") and value]
    mode = pooling.get("pooling_mode", [_MODES.get(name, name) for name in old] or "mean")
    mode = mode[0] if isinstance(mode, list) and len(mode) == 1 else mode
    if mode not in ("mean", "cls"):
        raise ModelError(f"the model's pooling is {mode!r}; `embed` has mean and cls")
    return str(mode)


def pool(states: Tensor, mask: Tensor, pooling: str = "mean") -> Tensor:
    """Return each text's vector, with length 1, from its last hidden states, (texts, tokens, size)."""
    if pooling == "cls":
        return normalize(states[:, 0].float(), dim=-1)
    kept = mask.unsqueeze(-1).float()
    return normalize((states.float() * kept).sum(1) / kept.sum(1), dim=-1)


class BiEncoder(nn.Module):
    """Encodes the columns of a batch, each at its own width. Everything else is the encoder's.

    ``prompts`` are those of sentence-transformers by name, in addition to the ``declared`` ones.
    """

    def __init__(
        self, encoder: Any, max_length: int, prompts: Mapping[str, str], declared: Declared
    ) -> None:
        super().__init__()
        self.encoder, self._max_length = encoder, max_length
        self._declared = declared
        if prompts:
            settings = self._declared[_SETTINGS]
            settings["prompts"] = {**settings.get("prompts", {}), **prompts}
            # As they are learned: the base may leave them out.
            self._declared[_POOLING].pop("include_prompt", None)
        self.pooling = find_pooling(self._declared)
        if own := getattr(encoder, "pooler", None):
            own.requires_grad_(False)  # no vector depends on it

    def __getattr__(self, name: str) -> Any:
        if name == "encoder":
            return super().__getattr__(name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.encoder, name)

    def forward(self, shapes: Tensor, **flat: Tensor) -> Tensor:
        """Return the vectors of all columns' texts, one column after the other: (texts, size).

        ``shapes`` has a row (texts, tokens) for each column; the columns' inputs are one after the other
        in each tensor of ``flat``.
        """
        vectors, at = [], 0
        for rows, width in shapes.tolist():
            part = {name: each[at : at + rows * width] for name, each in flat.items()}
            vectors.append(self.encode(**{k: v.view(rows, width) for k, v in part.items()}))
            at += rows * width
        return torch.cat(vectors)

    def encode(self, **inputs: Tensor) -> Tensor:
        """Return the vectors of one column's texts."""
        return pool(self.encoder(**inputs)[0], inputs["attention_mask"], self.pooling)

    def save_pretrained(self, folder: Path) -> None:
        """Save the encoder as transformers does, with what sentence-transformers needs."""
        self.encoder.save_pretrained(folder)
        size = self.encoder.config.get_text_config().hidden_size
        files = {
            **_SENTENCE_TRANSFORMERS,
            "sentence_bert_config.json": {"max_seq_length": self._max_length},
            _SETTINGS: {"similarity_fn_name": "cosine", **self._declared[_SETTINGS]},
            _POOLING: self._declared[_POOLING]
            or {"word_embedding_dimension": size, "pooling_mode_mean_tokens": True},
        }
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(content, indent=2), encoding="utf-8")
