"""The operations of a compiled layer: if a release of torch or transformers renames what the fast path
replaces, training would go on, only slower."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from transformers import AutoModel

from jobs.worker.fast.compilation import compile_layers
from jobs.worker.fast.graph_pass import GraphPass
from jobs.worker.fast.optimizer import halve_weights
from tests.jobs.worker.fast.test_families import build

SLOW = ("softmax", "scaled_dot_product", "flash", "dropout", "bernoulli", "rand")


def trace(name: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> list[Counter[str]]:
    """Return the operations of each graph of a family's layers, forward and then backward."""
    graphs: list[Counter[str]] = []
    plain = nn.Module.compile

    def record(module: Any, _: Any) -> Any:
        GraphPass()(module.graph)
        called = [each for each in module.graph.nodes if each.op == "call_function"]
        graphs.append(Counter(each.target.__name__.split(".")[0] for each in called))
        module.recompile()
        return module

    backend = aot_autograd(
        fw_compiler=record, bw_compiler=record, decompositions=select_decomp_table()
    )
    monkeypatch.setattr(
        nn.Module, "compile", lambda self, **_: plain(self, dynamic=dynamic, backend=backend)
    )
    torch._dynamo.reset()
    model = build(AutoModel, name).train()
    assert compile_layers(model) == 2
    halve_weights(model)
    model.config.use_cache = False
    ids = torch.randint(3, 32, (3, 16))
    with torch.autocast("cpu", torch.bfloat16):
        output = model(input_ids=ids, attention_mask=torch.ones_like(ids))[0]
    output.float().square().mean().backward()
    return graphs


# torch's own compiler warns of what its own parts still use.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("name", "linear", "attention"),
    [
        ("bert", 6, 2),
        ("distilbert", 6, 2),
        ("roberta", 6, 2),
        ("deberta", 4, 2),
        ("gpt2", 4, 2),
        ("llama", 7, 2),
    ],
)
def test_a_layer_has_only_the_products_and_operations_that_it_needs(
    name: str, linear: int, attention: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both layers share a graph for each pass. The backward pass has two products for each one forward."""
    # As training compiles them, of any size, which takes five times as long.
    graphs = trace(name, name == "bert", monkeypatch)
    slow = {each for graph in graphs for each in graph if any(part in each for part in SLOW)}
    linears = [graph["mm"] + graph["addmm"] for graph in graphs]
    products = [
        (count, graph["bmm"]) for count, graph in zip(linears, graphs, strict=True) if count
    ]
    assert slow == set()
    assert products == [(linear, attention), (2 * linear, 2 * attention)]
