"""Which parts of the fast path a model has in training."""

from __future__ import annotations

from typing import Any

from .attention import NAME
from .compilation import FAST
from .dropout import HashDropout
from .embedding import UsedEmbedding
from .first_token import FirstTokenNorm
from .int8 import Int8Linear
from .optimizer import KEPT

INT8_PRODUCTS = "int8 products"


def find_parts(model: Any) -> list[str]:
    """Return what has actually been replaced in a model, not what the options ask for."""
    fast, kinds = vars(model).get(FAST), {type(each) for each in model.modules()}
    compiled = fast.count if fast else 0
    found = {
        f"{compiled} compiled layers": compiled > 0,
        "attention as products": compiled > 0 and fast.attention == NAME,
        INT8_PRODUCTS: compiled > 0 and Int8Linear in kinds,
        "dropout by a hash": HashDropout in kinds,
        "bf16 weights": bool(vars(model).get(KEPT, [None])[0]),
        "last layer for the first token only": FirstTokenNorm in kinds,
        "only the data's words": UsedEmbedding in kinds,
    }
    return [name for name, is_active in found.items() if is_active]
