"""Messages that overlap with tasks against messages that are waited for at once, on four gloo
ranks.

A GPT on a V and an M, an mT5 on an NN, each under the searched schedule. The same program runs both
ways, in turns; the figure is the ratio of the medians on rank 0.

    python benchmarks/blocking.py --rounds 15
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from command_line import autopipe, parse_arguments
from side_by_side import Contestant, compare

MICRO_BATCHES = 8

MODELS = {
    "gpt": ("layers=8", "hidden=128", "heads=4", "vocabulary=8192", "sequence=64"),
    "mt5": ("layers=4", "hidden=128", "heads=4", "vocabulary=8192", "source=64", "target=64"),
}
SHAPES = {"v": "gpt", "m": "gpt", "nn": "mt5"}


def build(shape: str, ranks: int, folder: Path) -> Path:
    """The program of a shape."""
    model = folder / f"{shape}.onnx"
    settings = [
        word
        for size in (*MODELS[SHAPES[shape]], "loss=true", "weights=none")
        for word in ("--set", size)
    ]
    autopipe("zoo", "build", SHAPES[shape], "-o", model, *settings)
    batch = ["--batch-size", MICRO_BATCHES, "--micro-batches", MICRO_BATCHES]
    strategy = ["--strategy", "tessel_shapes", "--set", f"strategy.shape={shape}"]
    autopipe(
        "plan",
        model,
        "--gpus",
        ranks,
        "--cluster",
        "cpu-local",
        *batch,
        *strategy,
        "-o",
        folder / shape,
    )
    autopipe("codegen", folder / shape)
    return folder / shape / "program"


def main() -> None:
    """Build the programs, run each both ways, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=list(SHAPES))
    arguments = parse_arguments(parser, rounds=1, ranks=2, shapes=["v"])
    with tempfile.TemporaryDirectory() as scratch:
        for shape in arguments.shapes:
            program = build(shape, arguments.ranks, Path(scratch))
            ways = [
                Contestant("overlapping", program),
                Contestant("blocking", program, ("--blocking",)),
            ]
            seconds = compare(ways, arguments.ranks, arguments.rounds)
            print(
                json.dumps(
                    {
                        "shape": shape,
                        **seconds,
                        "ratio": seconds["blocking"] / seconds["overlapping"],
                    }
                )
            )


if __name__ == "__main__":
    main()
