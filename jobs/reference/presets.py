"""Models with their published settings, for both recipes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jobs.worker.training.options import TrainOptions


@dataclass(frozen=True)
class PublishedLaunch:
    """How `run_qa.py` was started: ranks per node, and the flags that differ between commands.

    ``reference`` means the published thread counts (``--placement reference``); otherwise each rank
    has its own cores.
    """

    ppn: int
    reference: bool = False
    ipex: bool = False
    bf16: bool = False
    overwrite: bool = False


@dataclass(frozen=True)
class Preset:
    """A model and its training settings; batch per rank. ``flags`` are the published command's."""

    model: str
    epochs: int
    batch_size: int
    learning_rate: float
    flags: tuple[str, ...]
    one_node: PublishedLaunch
    several_nodes: PublishedLaunch

    def as_options(self, base: TrainOptions) -> TrainOptions:
        """Return the fast recipe's options with this preset's values."""
        names = ("model", "epochs", "batch_size", "learning_rate")
        return replace(base, **{name: getattr(self, name) for name in names})

    def launch_on(self, nodes: int) -> PublishedLaunch:
        return self.one_node if nodes == 1 else self.several_nodes


PRESETS = {
    # https://huggingface.co/blog/intel-sapphire-rapids (December 2022): one process on one node, two
    # on each of four; the learning rate is the Trainer's default.
    "distilbert": Preset(
        model="distilbert-base-uncased",
        epochs=1,
        batch_size=32,
        learning_rate=5e-5,
        flags=(
            *("--model_name_or_path", "distilbert-base-uncased", "--dataset_name", "squad"),
            *("--do_train", "--do_eval", "--per_device_train_batch_size", "32"),
            *("--num_train_epochs", "1"),
        ),
        one_node=PublishedLaunch(ppn=1, ipex=True, bf16=True),
        several_nodes=PublishedLaunch(ppn=2, reference=True, bf16=True, overwrite=True),
    ),
    # https://huggingface.co/docs/transformers/v4.28.1/en/perf_train_cpu_many and later ones: two
    # processes on one node, four on two.
    "bert-large": Preset(
        model="bert-large-uncased",
        epochs=2,
        batch_size=12,
        learning_rate=3e-5,
        flags=(
            *("--model_name_or_path", "bert-large-uncased", "--dataset_name", "squad"),
            *("--do_train", "--do_eval", "--per_device_train_batch_size", "12"),
            *("--learning_rate", "3e-5", "--num_train_epochs", "2"),
            *("--max_seq_length", "384", "--doc_stride", "128"),
        ),
        one_node=PublishedLaunch(ppn=2, ipex=True),
        several_nodes=PublishedLaunch(ppn=2, ipex=True, bf16=True),
    ),
}
