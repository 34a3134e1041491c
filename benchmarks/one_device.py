"""What generated code costs: the one-device program of a GPT against the same model written by hand.

Both train on the same batches in one process, steps interleaved; the figure is the ratio of the medians. The
hand-written model is what a PyTorch user would write: `nn.Linear`, `scaled_dot_product_attention`, tied head.

    python benchmarks/one_device.py --layers 12 --hidden 768 --sequence 256 --rounds 15
    python benchmarks/one_device.py --compile
"""

from __future__ import annotations

import argparse
import json
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from command_line import autopipe, parse_arguments
from torch import nn


class Block(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(hidden)
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.output = nn.Linear(hidden, hidden)
        self.feed_forward_norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, hidden = x.shape
        normed = self.attention_norm(x)
        shape = (batch, sequence, self.heads, hidden // self.heads)
        query, key, value = (layer(normed).view(shape).transpose(1, 2) for layer in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(batch, sequence, hidden))
        return x + self.down(F.gelu(self.up(self.feed_forward_norm(x))))


class HandWrittenGPT(nn.Module):
    """The zoo's `gpt` as one would write it by hand."""

    def __init__(self, layers: int, hidden: int, heads: int, vocabulary: int, sequence: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Parameter(torch.randn(sequence, hidden) * 0.02)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def generated_step(arguments: argparse.Namespace, folder: Path) -> Callable[[], None]:
    """One training step of the program that autopipe generates for one device."""
    model, plan = folder / "gpt.onnx", folder / "gpt.plan"
    names = ("layers", "hidden", "heads", "vocabulary", "sequence")
    sizes = [f"{name}={getattr(arguments, name)}" for name in names]
    settings = [word for size in (*sizes, "loss=true", "weights=none") for word in ("--set", size)]
    autopipe("zoo", "build", "gpt", "-o", model, *settings)
    batch = ["--batch-size", arguments.batch, "--micro-batches", 1]
    autopipe("plan", model, "--gpus", 1, "--cluster", "cpu-local", *batch, "-o", plan)
    autopipe("codegen", plan)
    program = plan / "program"
    sys.path.insert(0, str(program))
    sys.argv = [str(program / "rank_000.py"), "--device", arguments.device]
    sys.argv += ["--compile"] if arguments.compile else []
    names = runpy.run_path(str(program / "rank_000.py"))
    rank, step = names["rank"], names["step"]
    rank.set_up()
    return lambda: rank.run(step)


def hand_written_step(arguments: argparse.Namespace) -> Callable[[], None]:
    """One training step of the hand-written model: forward, backward, SGD, loss read."""
    device = torch.device(arguments.device)
    model = HandWrittenGPT(
        arguments.layers, arguments.hidden, arguments.heads, arguments.vocabulary, arguments.sequence
    ).to(device)
    forward = torch.compile(model, fullgraph=True, dynamic=False) if arguments.compile else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    shape = (arguments.batch, arguments.sequence)

    def step() -> None:
        tokens, labels = (torch.randint(arguments.vocabulary, shape, device=device) for _ in range(2))
        loss = forward(tokens, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    return step


def interleaved(ours: Callable[[], None], theirs: Callable[[], None], rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of each round, run in turns, after two rounds of warm-up."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 2):
        for place in (0, 1) if turn % 2 else (1, 0):
            start = time.perf_counter()
            (ours, theirs)[place]()
            if turn >= 2:
                times[place].append(time.perf_counter() - start)
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("layers", 12), ("hidden", 768), ("heads", 12), ("vocabulary", 50257), ("sequence", 256), ("batch", 2),
        ("rounds", 15),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--compile", action="store_true", help="both through torch.compile")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parse_arguments(parser, layers=1, hidden=32, heads=2, vocabulary=64, sequence=16, batch=1, rounds=1)
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as scratch:
        ours = generated_step(arguments, Path(scratch))
        times = interleaved(ours, hand_written_step(arguments), arguments.rounds)
    mine, hand = map(statistics.median, times)
    ratios = sorted(own / other for own, other in zip(*times, strict=True))
    middle = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]  # The middle half of the rounds.
    figures = {"generated_s": mine, "hand_written_s": hand, "ratio": mine / hand, "ratios": middle}
    print(json.dumps(figures | vars(arguments)))


if __name__ == "__main__":
    main()
