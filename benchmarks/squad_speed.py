"""Speed of `train squad`: features per second, compared with run_qa.py's settings and with a strong user's.

python -m benchmarks.squad_speed [--shape bert-large] [--batch-size 32] [--steps 4] [--rounds 5]

The sides' processes take turns with the same features, so that other work on the machine affects all of
them: `fast` (the product's training), `baseline` (benchmarks.baseline, padded to 384), and `strong` (what a
strong user of Trainer chooses: grouped by length, padded to multiples of 8, no attention dropout, the fused
optimizer), all three in the same precision. More `--sides`: `strong-dropout`, with attention dropout;
`grouped`, run_qa.py's settings grouped by length; and `published`, the baseline in bf16, as published, on
any processor; one without bf16 emulates it, where `fast` would choose fp32.

Preparation, with compilation, is spread over a run of 2,000 steps: features of 2,000 steps / (its seconds +
2,000 x the seconds of a step).

All sides preload tcmalloc, as ranks do on the cluster's nodes and as the published run did; it keeps memory
from step to step. `--allocator plain` uses the system's allocator.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

from benchmarks.baseline import TRAINER
from benchmarks.common import ROOT, finish
from benchmarks.gemm import bare_tflops
from benchmarks.squad_data import find_encoder
from benchmarks.squad_sides import (
    LONGEST,
    RUN_STEPS,
    SIDES,
    Round,
    add_side_arguments,
    parse_round,
    side_arguments,
)
from provision.on_node.facts import find_tcmalloc

LIMITS = {"distilbert": 3.0, "bert-large": 2.5, "minilm": 2.5}
ALLOCATORS = ("plain", "tcmalloc")


class Player:
    """One side's process, which trains on request."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def play(self, steps: int, seed: int) -> Round:
        """One round; waits for its answer."""
        assert self._process.stdout is not None
        self._ask(f"{steps} {seed}\n")
        for line in self._process.stdout:
            if line.startswith('{"features"'):
                return parse_round(line)
        code = self._process.wait()
        why = ": the kernel ran out of memory? Give a smaller --batch-size" if code == -9 else ""
        raise SystemExit(f"a side ended with exit code {code}{why}")

    def _ask(self, line: str) -> None:
        assert self._process.stdin is not None
        # If it has ended, its answer will be missing.
        with suppress(BrokenPipeError):
            self._process.stdin.write(line)
            self._process.stdin.flush()


@contextmanager
def playing(side: str, args: argparse.Namespace) -> Iterator[Player]:
    """Run a side's process for the duration of a ``with`` block."""
    command = [sys.executable, "-m", "benchmarks.squad_sides", f"--side={side}"]
    with subprocess.Popen(
        [*command, *side_arguments(args)],
        cwd=ROOT,
        env=os.environ | environment(args),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Player(process)
        finally:
            process.kill()
            with suppress(BrokenPipeError):
                process.communicate()


def environment(args: argparse.Namespace) -> dict[str, str]:
    """Return the environment of all sides."""
    return preload(args.allocator) | {
        "OMP_NUM_THREADS": str(args.threads),
        "HF_HUB_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TOKENIZERS_PARALLELISM": "true",
    }


def preload(allocator: str = "tcmalloc") -> dict[str, str]:
    """Return the environment that selects an allocator; exit with one line if it is not installed."""
    if allocator == "plain":
        return {}
    path = find_tcmalloc()["path"]
    if path is None:
        raise SystemExit("no tcmalloc: apt-get install libtcmalloc-minimal4")
    return {"LD_PRELOAD": path}


class Played(NamedTuple):
    """One side's first steps, in which it prepares and compiles, each with its repetition, and its rounds."""

    first: list[list[Round]]
    rounds: list[Round]

    @property
    def preparation(self) -> float:
        """How many seconds longer the first steps took than their repetitions."""
        return sum(max(0.0, one.seconds - again.seconds) for one, again in self.first)

    def speed(self, steps: int, number: int) -> float:
        """Features a second over a run of RUN_STEPS steps as fast as those of that round."""
        each = self.rounds[number]
        seconds = self.preparation + RUN_STEPS * each.seconds / steps
        return each.features / steps * RUN_STEPS / seconds


def play(args: argparse.Namespace) -> dict[str, Played]:
    """Run all rounds of all sides in turn, or side after side."""
    groups = [[side] for side in args.sides] if args.apart else [args.sides]
    played: dict[str, Played] = {}
    for sides in groups:
        played |= play_together(sides, args)
    return played


def play_together(sides: Sequence[str], args: argparse.Namespace) -> dict[str, Played]:
    """Run all rounds of these sides in turn; each keeps its memory until the last one ends."""
    played: dict[str, Played] = {}
    with ExitStack() as stack:
        players = {side: stack.enter_context(playing(side, args)) for side in sides}
        for side, player in players.items():
            # The longest features first: they need the most memory, and torch compiles sums over more
            # than 4,096 tokens separately.
            pairs = [[player.play(1, seed) for _ in range(2)] for seed in (LONGEST, 1001)]
            played[side] = Played(pairs, [])
        for number in range(args.rounds):
            for side, player in players.items():
                each = player.play(args.steps, number)
                played[side].rounds.append(each)
                print(f"{number} {side}: {each.features / each.seconds:.3f} features/s", flush=True)
    return played


def figures(played: Mapping[str, Played], steps: int, gemm: float) -> dict[str, object]:
    """Return medians; ratios are of neighbors in time."""
    speeds = {
        side: [each.speed(steps, number) for number in range(len(each.rounds))]
        for side, each in played.items()
    }
    found: dict[str, object] = {
        "features_per_second": {n: round(statistics.median(v), 4) for n, v in speeds.items()},
        "preparation_s": {side: round(each.preparation, 1) for side, each in played.items()},
        "peak_memory_gb": {n: each.rounds[-1].memory_gb for n, each in played.items()},
        "gemm_tflops": round(gemm, 4),
    }
    if "fast" not in speeds:
        return found
    for other in set(speeds) - {"fast"}:
        pairs = zip(speeds["fast"], speeds[other], strict=True)
        found[f"ratio_{other}"] = round(statistics.median(a / b for a, b in pairs), 3)
    rounds = played["fast"].rounds
    useful = statistics.median(each.teraflop / each.seconds for each in rounds)
    return found | {
        "fast_tflops": round(useful, 4),
        "share_of_gemm": round(useful / gemm, 3),
        "tokens_per_feature": round(
            sum(each.tokens for each in rounds) / sum(each.features for each in rounds), 1
        ),
    }


def add_round_arguments(parser: argparse.ArgumentParser, sides: Sequence[str]) -> None:
    """Add the options of :func:`play`; ``sides`` are the default ones."""
    parser.add_argument("--steps", type=int, default=4, help="per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--allocator", choices=ALLOCATORS, default="tcmalloc")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=sides)
    parser.add_argument(
        "--apart",
        action="store_true",
        help="one side after another: those that do not fit in memory together",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_side_arguments(parser)
    add_round_arguments(parser, ["baseline", "strong", "fast"])
    args = parser.parse_args()
    if args.run_qa is not None:
        args.sides = [*args.sides, "run_qa"]
    args.encoder = find_encoder(args.encoder)
    played = play(args)
    gemm = bare_tflops(args.dtype, args.threads)
    found = figures(played, args.steps, gemm)
    limit = LIMITS[args.shape]
    ratio = found.get("ratio_baseline", found.get("ratio_published"))
    missed = [f"{limit} x the baseline"] if isinstance(ratio, float) and ratio < limit else []
    finish(
        missed,
        benchmark="squad_speed",
        limit_ratio=limit,
        **found,
        baseline=TRAINER,
        **{
            name: getattr(args, name)
            for name in (
                "shape",
                "batch_size",
                "dtype",
                "threads",
                "compile",
                "allocator",
                "steps",
                "rounds",
                "attention_dropout",
            )
        },
        counted_over_steps=RUN_STEPS,
    )


if __name__ == "__main__":
    main()
