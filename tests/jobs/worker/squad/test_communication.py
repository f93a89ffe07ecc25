"""The mean of two processes' gradients over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from jobs.worker.squad.communication import word_embeddings
from tests.jobs.worker.squad.test_run import TIMEOUT, free_port

RANK = """
import sys, torch
from jobs.worker.squad.communication import Replica
from jobs.worker.runtime.ranks import join
from tests.jobs.worker.squad.test_communication import small_model

wire, folder = sys.argv[1:]
with join("gloo") as ranks:
    model = small_model()
    model.words.weight.data += ranks.rank  # as another version of a model would be
    replica = Replica(model, getattr(torch, wire), ranks.control)
    ids = torch.tensor([[1, 2, 2], [3, 4, 4]])[ranks.rank : ranks.rank + 1]
    for part in range(2):  # the first is accumulated, and sends nothing
        if part == 0:
            with replica.no_sync():
                replica(ids).backward()
            continue
        announced = replica.announce(ids)
        replica(ids).backward()
    replica.average_words(announced)
    gradients = {name: each.grad for name, each in model.named_parameters()}
    torch.save(gradients, f"{folder}/{ranks.rank}.pt")
"""


class Small(nn.Module):
    """Words, a layer, and a number that depends on both."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 8)
        self.layer = nn.Linear(8, 4)

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(self.words(ids)).pow(2).mean()
        return result


def small_model() -> Small:
    torch.manual_seed(3)
    return Small()


@pytest.mark.parametrize(("wire", "tolerance"), [("float32", 1e-6), ("bfloat16", 2**-7)])
def test_two_ranks_get_the_mean_of_their_gradients(
    tmp_path: Path, wire: str, tolerance: float
) -> None:
    port = free_port()
    running = []
    for rank in range(2):
        environ = os.environ | {
            "PMI_RANK": str(rank),
            "PMI_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        argv = [sys.executable, "-c", RANK, wire, str(tmp_path)]
        running.append(subprocess.Popen(argv, env=environ))
    try:
        assert [process.wait(TIMEOUT) for process in running] == [0, 0]
    finally:
        for process in running:
            process.kill()
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    model = small_model()
    # Each of them twice, as the ranks have accumulated; the mean over both ranks.
    for ids in ([[1, 2, 2]], [[3, 4, 4]]):
        model(torch.tensor(ids)).backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(first[name], second[name]), "the same on both ranks, to the bit"
        assert parameter.grad is not None
        scale = float(parameter.grad.abs().max())
        assert torch.allclose(first[name], parameter.grad, rtol=tolerance, atol=tolerance * scale)
    assert first["words.weight"][5:].abs().sum() == 0, "words of no rank"


def test_word_embeddings_are_found_unless_another_layer_shares_them() -> None:
    model = small_model()
    assert word_embeddings(model) is model.words.weight
    model.layer = nn.Linear(8, 10)
    model.layer.weight = model.words.weight
    assert word_embeddings(model) is None
    model = small_model()
    model.words.weight.requires_grad_(False)
    assert word_embeddings(model) is None
