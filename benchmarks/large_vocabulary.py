"""A GPT whose vocabulary outweighs its layers, on four gloo ranks: M-shape under the searched
schedule against 1F1B.

1F1B runs the best chain of stages that `pipedream` finds, one device a stage. The M-shape splits
embedding, head and loss by vocabulary over all devices. Steps are interleaved; the figure is the
ratio of the medians on rank 0.

    python benchmarks/large_vocabulary.py --rounds 15
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from command_line import autopipe, parse_arguments
from side_by_side import Contestant, compare

RANKS = 4


def build(arguments: argparse.Namespace, folder: Path) -> list[Contestant]:
    """The programs of both plans."""
    model = folder / "gpt.onnx"
    names = ("layers", "hidden", "heads", "vocabulary", "sequence")
    sizes = [f"{name}={getattr(arguments, name)}" for name in names]
    settings = [word for size in (*sizes, "loss=true", "weights=none") for word in ("--set", size)]
    autopipe("zoo", "build", "gpt", "-o", model, *settings)
    batch = ["--batch-size", arguments.micro_batches, "--micro-batches", arguments.micro_batches]
    shared = ["--gpus", RANKS, "--cluster", "cpu-local", *batch]
    plans = {
        "1f1b": [
            "--strategy",
            "pipedream",
            "--set",
            "strategy.replicate=false",
            "--schedule",
            "1f1b",
        ],
        "tessel": [
            "--strategy",
            "tessel_shapes",
            "--set",
            "strategy.shape=m",
            "--schedule",
            "tessel",
        ],
    }
    contestants = []
    for name, words in plans.items():
        autopipe("plan", model, *shared, *words, "-o", folder / name)
        autopipe("codegen", folder / name)
        contestants.append(Contestant(name, folder / name / "program"))
    return contestants


def main() -> None:
    """Build both programs, run them in turns, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("layers", 4), ("hidden", 256), ("heads", 8), ("vocabulary", 64000), ("sequence", 128),
        ("micro-batches", 8), ("rounds", 15),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parse_arguments(
        parser, layers=4, hidden=32, heads=2, vocabulary=512, sequence=16, micro_batches=4, rounds=1
    )
    with tempfile.TemporaryDirectory() as scratch:
        seconds = compare(build(arguments, Path(scratch)), RANKS, arguments.rounds)
    print(json.dumps({**seconds, "speedup": seconds["1f1b"] / seconds["tessel"]}))


if __name__ == "__main__":
    main()
