"""Fast layers of a model in training, and the comparison of each kind of batch with plain operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..runtime.errors import first_line
from .attention import LONGEST, LONGEST_CAUSAL, NAME, PLAIN
from .compilation import FAST, compile_layers, find_layers, plain_layers, way_to_layers
from .dropout import HashDropout, draw_seeds
from .int8 import Int8Linear

_RECOMPUTES = ("gradient_checkpointing", "activation_checkpointing")
"""What transformers' modules call it before 5.20 and since."""
_DROPOUT_TWICE = "gradient checkpointing computes them twice, with other dropout"
_MOST = {"fp32": (1e-3, 1e-2), "bf16": (0.05, 0.2), "int8": (0.3, 0.6)}
"""Accepted differences of outputs and gradients, as parts of their norms, by precision.

Another mask changes them by more; the order of operations and their rounding change them by less. In int8, a
pretrained MiniLM's outputs differ by 0.1; all of them are compared with plain layers in bf16 or fp32.
"""


class FastLayers:
    """A forward pre-hook that switches a model's compiled layers on for training.

    It switches them off for evaluation, which would have to compile them again, and for a single row, for
    which torch would as well. The first batch of each kind is computed twice, also with plain operations. If
    the results differ, or can't be compiled, the layers stay plain from then on; ``trouble`` is the reason.

    Scripts call the model, or a part that contains the layers, such as ``model.bert``. The hook is on each of
    these, and acts once for a call, where it enters. Their copies and pickles are plain, without classes of
    this package.
    """

    def __init__(
        self, model: Any, say: Callable[[str], None], *, shared: bool, int8: bool = False
    ) -> None:
        config = getattr(model, "config", None)
        self._before = self._now = getattr(config, "_attn_implementation", None)
        self.count = compile_layers(model, shared=shared, int8=int8)
        self.attention = self._now = getattr(config, "_attn_implementation", None)
        # Module.compile sets it, and has no inverse.
        calls = [(each, each._compiled_call_impl) for each in model.modules()]
        self._calls = [(module, call) for module, call in calls if call is not None]
        self._on, self._rows, self._seen = True, 0, set[Any]()
        self._limits = (LONGEST_CAUSAL, LONGEST, getattr(config, "sliding_window", None) or 0)
        self._flags = [(m, n) for m in model.modules() for n in _RECOMPUTES if hasattr(m, n)]
        self._say, self._shared, self.trouble = say, shared, ""
        self._model, self.hooks = model, list[Any]()
        self._entered: Any = None
        for each in way_to_layers(model):
            self.hooks += [
                each.register_forward_pre_hook(self, with_kwargs=True),
                each.register_forward_hook(self._leave, always_call=True),
            ]
            # Copying and pickling look it up here as well.
            vars(each)["__reduce_ex__"] = partial(self._reduce, each)
        setattr(model, FAST, self)

    def __call__(self, model: Any, inputs: Any, named: Any) -> None:
        if self._entered is not None:
            return
        self._entered = model
        if not model.training:
            self._switch(on=False, attention=self._before)
            return
        rows, kind = self._kind(inputs, named)
        self._rows = self._rows or rows
        compiled = rows > 1 or self._rows == 1
        if compiled and torch.is_grad_enabled() and kind not in self._seen:
            self._seen.add(kind)
            self.trouble = self._compare(model, inputs, named)
            if self.trouble:
                # With other ranks, their replica ends it everywhere two steps later, and says why.
                self.end([] if self._shared else [self.trouble])
                return
        self._switch(on=compiled, attention=self.attention)
        draw_seeds(self._model)

    def _leave(self, model: Any, *_: Any) -> None:
        if model is self._entered:
            self._entered = None

    def _reduce(self, module: Any, protocol: Any) -> Any:
        """Return what a plain copy of a module is made of, for ``copy`` and ``pickle``."""
        self._switch(on=False, attention=self._before)
        kind: Any = type(module)
        parts = kind.__reduce_ex__(module, protocol)
        if len(parts) < 3 or not isinstance(parts[2], dict):
            return parts  # a model's own way
        own = {each.id for each in self.hooks}
        state = {n: each for n, each in parts[2].items() if n not in (FAST, "__reduce_ex__")}
        for name in [each for each in state if each.startswith("_forward_")]:
            others = (each for each in state[name].items() if each[0] not in own)
            state[name] = type(state[name])(others)
        return (*parts[:2], state, *parts[3:])

    def end(self, troubles: Sequence[str]) -> None:
        """Leave the layers plain from now on, and say the first of all ranks' troubles."""
        self.count = 0
        plain_layers(self._model, self._before)
        for rank, text in [each for each in enumerate(troubles) if each[1]][:1]:
            self._say(f"layers are no longer compiled: rank {rank}: {text}")

    def _switch(self, *, on: bool, attention: str | None) -> None:
        if on != self._on:
            self._on = on
            for module, call in self._calls:
                module._compiled_call_impl = call if on else None
        if attention != self._now:
            self._now = attention
            self._model.set_attn_implementation(attention)

    def _kind(self, inputs: Any, named: Any) -> tuple[int, Any]:
        """Return the rows of a batch, and what decides how its layers and masks are computed."""
        given = _tensors((named.get("input_ids"), inputs, named))
        first = next((each for each in given if each.dim()), None)
        shape = (*(() if first is None else first.shape), 0, 0)
        mask = named.get("attention_mask")
        padded = isinstance(mask, Tensor) and not bool(mask.all())
        recomputes = any(getattr(module, name) for module, name in self._flags)
        return shape[0], (sum(shape[1] > limit for limit in self._limits), padded, recomputes)

    def _compare(self, model: Any, inputs: Any, named: Any) -> str:
        """Return what is wrong with the fast layers for a batch; nothing remains of the comparison."""
        if any(getattr(*each) for each in self._flags) and _find_own(model):
            return _DROPOUT_TWICE
        state, autocast = torch.get_rng_state(), [torch.is_autocast_enabled("cpu")]
        kept = [
            (module._buffers, name, each, each._version, each.clone())
            for module in model.modules()
            for name, each in module._buffers.items()
            if each is not None
        ]
        # Accelerate's begins inside the model.
        hook = (find_layers(model) or [model])[0].register_forward_pre_hook(
            lambda *_: autocast.append(torch.is_autocast_enabled("cpu"))
        )
        names = {False: PLAIN if self.attention == NAME else self._before, True: self.attention}
        results: list[Sequence[Tensor]] = []
        try:
            for on in (False, True):
                self._switch(on=on, attention=names[on])
                torch.set_rng_state(state)
                draw_seeds(self._model)
                outputs, gradients, trouble = _differentiate(model, inputs, named)
                hook.remove()  # with it, a compiled layer would be compiled again
                if trouble:
                    return trouble
                results += [outputs, gradients]
        except Exception as error:
            # A model that fails here may still train: some functions refuse torch.autograd.grad.
            line = first_line(getattr(error, "inner_exception", error))
            return line if results else f"can't be compared with plain ones: {line}"
        finally:
            hook.remove()
            torch.set_rng_state(state)
            with torch.no_grad():
                for buffers, name, each, version, value in kept:
                    buffers[name] = each
                    if each._version != version:
                        each.copy_(value)
        is_bf16 = any(autocast) or any(each.dtype == torch.bfloat16 for each in model.parameters())
        has_int8 = any(isinstance(each, Int8Linear) for each in model.modules())
        kind = "int8" if has_int8 else "bf16" if is_bf16 else "fp32"
        for name, expected, found, most in zip(  # noqa: B905 - 3.8
            ("outputs", "gradients"), results[:2], results[2:], _MOST[kind]
        ):
            part = _difference(found, expected)
            if not part <= most:
                return f"{name} would differ from those of plain layers by {100 * part:.1f} %"
        return ""


def _differentiate(model: Any, inputs: Any, named: Any) -> tuple[list[Tensor], list[Tensor], str]:
    """Return a batch's outputs, gradients in the first and the last layer, and why they can't be compared.

    Two layers' gradients need little memory, and their computation goes through all layers.
    """
    found = [each for each in _tensors(model.forward(*inputs, **named)) if each.requires_grad]
    mask = named.get("attention_mask")
    if isinstance(mask, Tensor):  # outputs of padding are arbitrary
        found = [each[mask != 0] if each.shape[:2] == mask.shape else each for each in found]
    outputs = [each for each in found if each.dim()] or found
    layers = [[p for p in each.parameters() if p.requires_grad] for each in find_layers(model)]
    layers = [each for each in layers if each]
    weights = [*dict.fromkeys(layers[0] + layers[-1])] if layers and outputs else []
    own = _find_own(model)
    seeds = [each.seed for each in own]
    # No sum of all: that of a softmax or a normalization is constant.
    noise = [torch.arange(each.numel()).view_as(each).cos() for each in outputs]
    total: Any = sum((each.float() * other).sum() for each, other in zip(outputs, noise))  # noqa: B905
    hidden = bool(weights) and _has_checkpoints(total.grad_fn)
    gradients = torch.autograd.grad(total, weights, allow_unused=True) if weights else ()
    again = any(each.seed is not seed for each, seed in zip(own, seeds))  # noqa: B905 - 3.8
    filled = [torch.zeros(()) if each is None else each for each in gradients]
    trouble = (
        _DROPOUT_TWICE if again else "reentrant checkpointing hides gradients" if hidden else ""
    )
    return [each.detach() for each in outputs], filled, trouble


def _has_checkpoints(last: Any) -> bool:
    """Return whether a graph has a reentrant checkpoint: torch.autograd.grad finds no weights behind it."""
    found, waiting = set(), [last]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += [each for each, _ in node.next_functions if each is not None]
    return any("CheckpointFunction" in each.name() for each in found)


def _find_own(model: Any) -> list[HashDropout]:
    return [each for each in model.modules() if isinstance(each, HashDropout)]


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in a model's inputs or outputs."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (Mapping, tuple, list)):
        for each in values.values() if isinstance(values, Mapping) else values:
            yield from _tensors(each)


def _difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the norm of the difference as a part of the expected values' norm."""
    pairs = [(a.float(), b.float()) for a, b in zip(found, expected)]  # noqa: B905 - 3.8
    whole = sum(float(b.square().sum()) for _, b in pairs)
    wrong = sum(float((a - b).square().sum()) for a, b in pairs)
    return float((wrong / whole) ** 0.5) if whole else float(wrong > 0)
