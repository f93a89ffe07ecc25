"""`serve`: a trained model over HTTP, for trying it and for use inside a network."""

from __future__ import annotations

from typing import Any

TOKENS = "prompt_tokens"
"""In the answer of a model of vectors: how many tokens it read."""
Answer = dict[str, Any] | str
"""A row's prediction, or why there is none."""
