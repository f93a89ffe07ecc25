"""Answers of a small model that `train lm` tunes on 500 chats: sums and dates.

python -m benchmarks.chat_answers [--seed N]

The model has random weights and 1.1 million parameters. It is asked 200 other questions. An answer counts if
it is right to the letter, by transformers' greedy generation. Takes a few minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

from transformers import AutoTokenizer

from benchmarks.common import finish
from jobs.worker.tasks.lm.model import LmOptions
from jobs.worker.tasks.lm.task import Lm
from jobs.worker.training.options import NO_CACHE
from jobs.worker.training.run import run_task
from tests.jobs.worker.tasks.chat_models import (
    ask_date,
    ask_sum,
    make_chats,
    new_chat_tokenizer,
    save_chat_model,
    share_answered,
)

SEEN, UNSEEN, BAR = 500, 200, 0.9
SHAPE = {"hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 3}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("--seed", type=int, default=1)
    seed: int = parser.parse_args().seed
    chats = make_chats(SEEN + UNSEEN, random.Random(seed), ask_sum, ask_date)
    seen, unseen = chats[:SEEN], chats[SEEN:]
    with tempfile.TemporaryDirectory() as root:
        tokenizer = new_chat_tokenizer(json.dumps(each) for each in seen)
        base = save_chat_model(Path(root, "base"), tokenizer, **SHAPE)
        data = Path(root, "seen.jsonl")
        data.write_text("".join(json.dumps(each) + "\n" for each in seen))
        options = LmOptions(
            model=str(base),
            data=str(data),
            output=str(Path(root, "output")),
            token_cache=NO_CACHE,
            epochs=60,
            batch_size=20,
            learning_rate=1e-3,
            weight_decay=0.1,
            dtype="fp32",
            max_length=64,
            compile="off",
            report_to="none",
            seed=seed,
        )
        untuned, begin = share_answered(base, tokenizer, unseen), time.process_time()
        if run_task(Lm, options):
            raise SystemExit("the training failed")
        seconds, model = time.process_time() - begin, Path(root, "output", "model")
        tuned = share_answered(model, AutoTokenizer.from_pretrained(model), unseen)
    missed = [] if tuned >= BAR and not untuned else ["answers"]
    finish(missed, untuned=untuned, tuned=tuned, cpu_seconds=round(seconds), seed=seed)


if __name__ == "__main__":
    main()
