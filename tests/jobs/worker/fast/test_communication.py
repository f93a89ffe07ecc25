"""The sum of several processes' gradients over gloo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from jobs.worker.fast.communication import Replica
from jobs.worker.fast.sums import choose_all_reduce, sum_in_ring
from jobs.worker.runtime.process import LocalPlace, RankIdentity
from jobs.worker.runtime.ranks import Ranks, join
from tests.jobs.worker.training.test_run import run_ranks

ROOT = Path(__file__).parents[4]

RANK = """
import os, sys, torch
from jobs.worker.runtime.ranks import join, lost_peer
from jobs.worker.fast.communication import Replica
from jobs.worker.fast.embedding import restore_words, train_used_words
from tests.jobs.worker.fast.test_communication import IDS, USED, small_model

wire, folder, leaves = sys.argv[1:]
with join("gloo") as ranks:
    model = small_model()
    model.words.weight.data += ranks.rank  # as another version of a model would be
    used = USED if wire == "float32" else range(10)
    train_used_words(model, used)
    replica = Replica(model, ranks, wire == "bfloat16")
    ids = torch.tensor(IDS[ranks.rank : ranks.rank + 1])
    (0 * replica(ids)).backward()  # every word's gradient is zero, on all ranks
    replica.zero_grad()
    with replica.no_sync():  # accumulated, sends nothing
        replica(ids).backward()
    if leaves:
        if ranks.rank == 3:
            os._exit(0)
        try:
            replica(ids).backward()
        except Exception as error:
            os._exit(0 if lost_peer(error) else 1)
    replica(ids).backward()
    gradients = {name: each.grad for name, each in model.named_parameters()}
    restore_words(model)
    gradients["table"] = model.words.weight.detach()
    rows = gradients["words.weight"]
    gradients["words.weight"] = torch.zeros(10, 8).index_copy(0, torch.tensor([*used]), rows)
    gradients["way"] = type(replica.all_reduce).__name__
    torch.save(gradients, f"{folder}/{ranks.rank}.pt")
"""
USED = [1, 2, 3, 4, 5, 6, 8]
IDS = [
    *([1, 2, 2], [3, 4, 4], [1, 4, 5], [5, 6, 2]),
    *([1, 3, 3], [6, 6, 4], [2, 5, 5], [4, 3, 6]),
]


class Small(nn.Module):
    """Words, a layer, and a number that depends on both."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 8)
        self.layer = nn.Linear(8, 3)

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(self.words(ids)).pow(2).mean()
        return result


def small_model() -> Small:
    torch.manual_seed(3)
    return Small()


def run_script(size: int, local: int, *argv: str, script: str = RANK) -> None:
    """Run a script on nodes with ``local`` ranks each, as it seems to them."""
    ended = run_ranks(ROOT, [["-c", script, *argv]] * size, local)
    assert [each.code for each in ended] == [0] * size, ended


@pytest.mark.parametrize(
    ("size", "local", "wire", "tolerance", "way"),
    [
        (2, 2, "float32", 1e-6, "function"),
        (2, 1, "bfloat16", 2**-7, "function"),
        (6, 2, "float32", 1e-6, "SumOfParts"),
        (8, 2, "bfloat16", 2**-6, "SumOfParts"),
    ],
)
def test_ranks_get_the_sum_of_their_gradients(
    tmp_path: Path, size: int, local: int, wire: str, tolerance: float, way: str
) -> None:
    run_script(size, local, wire, str(tmp_path), "")
    first, *others = (torch.load(tmp_path / f"{rank}.pt") for rank in range(size))
    model = small_model()
    # Each of them twice, as the ranks have accumulated.
    for ids in IDS[:size]:
        (model(torch.tensor([ids])) * 2).backward()
    assert first.pop("way") == way
    assert all(torch.equal(first["table"], other["table"]) for other in others), "also unused words"
    for name, parameter in model.named_parameters():
        assert all(torch.equal(first[name], other[name]) for other in others), "to the bit"
        assert parameter.grad is not None
        scale = float(parameter.grad.abs().max())
        assert torch.allclose(first[name], parameter.grad, rtol=tolerance, atol=tolerance * scale)
    assert first["words.weight"][7:].abs().sum() == 0, "words of no rank"


ENGINE = """
import sys, numpy as np, torch
from jobs.worker.runtime.ranks import join
from jobs.worker.tasks.digits import Digits
from jobs.worker.training.batches import SampleList, TrainingRun
from jobs.worker.training.optimizer_step import prepare, take_step
from jobs.worker.training.task import Loaded
from tests.jobs.worker.fast.test_communication import IDS, small_model
from tests.jobs.worker.threaded_ranks import session

class Named(Digits):  # the embeddings of IDs that have other names, or only one of two
    def collate(self, samples, loaded):
        ids = torch.tensor(samples)
        return {"others": ids} if named == "none" else {"input_ids": ids, "others": ids + 3}

    def loss(self, model, batch):
        return sum(model(ids) for ids in batch.values())

with join("gloo") as ranks:
    options = Digits.Options(batch_size=4 // ranks.size, compile="off", wire="fp32", dtype="fp32")
    trained = {}
    for named in ("none", "one of two"):
        model = small_model()
        run = TrainingRun(session(options, ranks), Named(options), Loaded(model), SampleList(IDS))
        replica, optimizer = prepare(run, 2)
        for _ in range(2):
            take_step(run, replica, optimizer, run.batch(np.arange(4)))
        trained |= {f"{named}, {name}": each for name, each in model.state_dict().items()}
    torch.save(trained, f"{sys.argv[1]}/{ranks.size}-{ranks.rank}.pt")
"""


def test_embeddings_stay_equal_whatever_a_task_calls_its_ids(tmp_path: Path) -> None:
    for size in (1, 2):
        run_script(size, size, str(tmp_path), script=ENGINE)
    alone, first, other = (torch.load(tmp_path / f"{name}.pt") for name in ("1-0", "2-0", "2-1"))
    assert len(alone) == 2 * len(small_model().state_dict())
    for name, expected in alone.items():
        assert torch.equal(first[name], other[name]), name
        assert torch.allclose(first[name], expected, atol=1e-6), name


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_only_buffers_that_training_may_change_are_sent(
    persistent: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Constants such as rotary embeddings' frequencies are not part of a model's state."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    model = small_model()
    model.register_buffer("more", torch.zeros(3, dtype=dtype), persistent=persistent)
    with join("gloo", environ={}) as ranks:
        replica = Replica(model, ranks, False)
        assert replica.broadcast_buffers is (persistent and dtype.is_floating_point)


@pytest.mark.parametrize("name", ["process_group", "device_mesh"])
def test_a_group_of_some_ranks_is_refused(name: str) -> None:
    options: Any = {name: object()}
    with pytest.raises(ValueError, match=f"{name} is not supported"):
        Replica(small_model(), Ranks(RankIdentity()), False, **options)


def test_unequal_nodes_sum_in_one_ring() -> None:
    places = [LocalPlace(0, 2), LocalPlace(1, 2), LocalPlace(0, 1)]
    ranks = Ranks(RankIdentity(0, 3), "gloo", "", None, places[0])
    object.__setattr__(ranks, "gather", lambda _: places)
    assert choose_all_reduce(ranks) is sum_in_ring


def test_a_lost_rank_is_noticed_where_ranks_sum_by_node(tmp_path: Path) -> None:
    run_script(4, 2, "float32", str(tmp_path), "rank 3")


AGREE = """
import json, sys, torch
from jobs.worker.runtime.ranks import join
from jobs.worker.fast.communication import Replica
from jobs.worker.fast.compilation import FAST
from tests.jobs.worker.fast.test_communication import IDS, small_model

class Layers:
    trouble = ""
    def end(self, texts):
        ended.append([step, texts])

ended = []
with join("gloo") as ranks:
    model = small_model()
    vars(model)[FAST] = Layers()
    replica = Replica(model, ranks, False)
    for step in range(6):
        if (step, ranks.rank) == (2, 1):
            vars(model)[FAST].trouble = "no compiler"
        replica(torch.tensor(IDS[ranks.rank : ranks.rank + 1])).backward()
    with open(f"{sys.argv[1]}/{ranks.rank}.json", "w") as file:
        json.dump(ended, file)
"""


def test_all_ranks_leave_compiled_layers_before_the_same_step_if_one_has_to(tmp_path: Path) -> None:
    run_script(2, 2, str(tmp_path), script=AGREE)

    # Rank 1 says so with its step 2, which starts as compiled as that of rank 0.
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == [[3, ["", "no compiler"]]]


EXCHANGE = """
import os, sys, torch
from torch import nn
from jobs.worker.runtime.ranks import join
from jobs.worker.fast.communication import Replica
from tests.jobs.worker.fast.test_communication import small_model

def count():
    return len(os.listdir("/proc/self/task"))

with join("gloo") as ranks:
    torch.set_num_threads(4)
    torch.ones(2**22).add_(1.0)
    model = small_model()
    model.layer = nn.Linear(8, 2**18)
    before = count()
    replica = Replica(model, ranks, True)
    ids = torch.tensor([[1, 2]])
    for _ in range(3):
        replica(ids).backward()
    added = count() - before
assert torch.get_num_threads() == 4, "the main thread keeps its team"
with open(f"{sys.argv[1]}/{ranks.rank}", "w") as file:
    file.write(str(added))
"""


@pytest.mark.parametrize(("size", "local", "most"), [(2, 1, 1), (4, 2, 24)])
def test_the_exchange_starts_no_teams_of_threads(
    tmp_path: Path, size: int, local: int, most: int
) -> None:
    """Each stage of a sum by node has a helper and gloo's threads. A team would add three."""
    run_script(size, local, str(tmp_path), script=EXCHANGE)
    added = [int(path.read_text()) for path in tmp_path.iterdir()]
    assert len(added) == size
    assert all(each <= most for each in added), added
