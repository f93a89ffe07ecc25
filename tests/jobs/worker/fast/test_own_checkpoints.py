"""Checkpoints of a Trainer on two nodes without a shared folder."""

from __future__ import annotations

from pathlib import Path

from tests.jobs.worker.fast.test_own_script import run_script

TRAIN = """
import os, shutil, torch, torch.distributed as dist
from pathlib import Path
from safetensors.torch import load_file
from transformers import DistilBertConfig, DistilBertForSequenceClassification
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
from spr_cluster import speed_up

OUTPUT = Path("../output/model")  # of this rank's node
shape = dict(dim=32, n_layers=1, n_heads=2, hidden_dim=64, num_labels=2)
rows = [
    {"input_ids": torch.randint(3, 99, (8,), generator=torch.Generator().manual_seed(n)), "labels": n % 2}
    for n in range(32)
]

def new_model():
    torch.manual_seed(1)
    return DistilBertForSequenceClassification(DistilBertConfig(vocab_size=99, **shape))

class Begin(TrainerCallback):
    def on_train_begin(self, args, state, control, **_):
        self.step = state.global_step

def train(resume=None, steps=4, model_init=None, **options):
    scores = iter([0, 1, 0, 0, 0])  # the best is the second one
    options = {"max_steps": steps, "lr_scheduler_type": "constant", **options}
    arguments = TrainingArguments(
        str(OUTPUT), use_cpu=True, per_device_train_batch_size=4, learning_rate=1e-2, report_to="none",
        save_strategy="steps", save_steps=1, disable_tqdm=True, **options
    )
    trainer = Trainer(
        None if model_init else new_model(), arguments, train_dataset=rows, eval_dataset=rows[:4],
        compute_metrics=lambda _: {"score": next(scores)}, model_init=model_init,
        callbacks=[begin := Begin()],
    )
    speed_up(trainer)
    trainer.train(resume_from_checkpoint=resume)
    trainer.begun = begin.step
    return trainer

def weights(step):
    return load_file(OUTPUT / f"checkpoint-{step}" / "model.safetensors")

def same_everywhere(trainer, wanted, **tolerance):
    own = dict(trainer.model.state_dict())
    torch.testing.assert_close(own, dict(wanted), **tolerance)
    everywhere = [None, None]
    dist.all_gather_object(everywhere, own)
    torch.testing.assert_close(everywhere[0], everywhere[1], rtol=0, atol=0)

def start_over():
    dist.barrier()
    shutil.rmtree(OUTPUT, ignore_errors=True)

best = dict(eval_strategy="steps", eval_steps=1, load_best_model_at_end=True)
best |= dict(metric_for_best_model="score", greater_is_better=True)
rank = int(os.environ["RANK"])
for options in ({"save_on_each_node": True}, {"save_on_each_node": True, "model_init": new_model}, {}):
    trainer = train(**best, **options)
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2"), trainer.state
    if options:
        names = {"model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"}
        for step in range(1, 5):
            here = {each.name for each in (OUTPUT / f"checkpoint-{step}").iterdir()}
            assert names <= here, (step, sorted(names - here))
    same_everywhere(trainer, weights(2))
    start_over()

def resume(wanted, steps=5):
    dist.barrier()
    last = get_last_checkpoint(str(OUTPUT)) if OUTPUT.is_dir() else None
    trainer = train(last, steps, save_on_each_node=True)
    assert trainer.begun == wanted, trainer.begun
    same_everywhere(trainer, weights(steps))
    return trainer

def lose(step):
    (OUTPUT / f"checkpoint-{step}" / "trainer_state.json").unlink()

whole = weights(4) if train(save_on_each_node=True) else None
if not rank:  # killed while it saved the last one
    lose(4)
resume(4)
lose(5)
lose(4)
same_everywhere(resume(3, 4), whole, rtol=1e-4, atol=1e-6)
for lost in (0, 1):  # a new node takes its place
    if rank == lost:
        shutil.rmtree(OUTPUT)
    resume(4 + lost, 5 + lost)

start_over()
for given in (True, str(OUTPUT / "checkpoint-7")):
    try:
        train(resume=given)
        raise SystemExit("it starts over without a word")
    except (ValueError, OSError):  # Trainer's own
        pass
dist.barrier()
dist.destroy_process_group()
"""


def test_checkpoints_of_every_node_are_whole_and_all_ranks_continue_from_the_same(
    node: Path,
) -> None:
    ended = run_script(node, TRAIN, local=1)
    assert [each.code for each in ended] == [0, 0], "\n".join(each.output for each in ended)
