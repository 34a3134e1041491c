"""Cost of generated code: the one-device program of a GPT against the same model written by hand.

Both train in one process with the same optimizer and precision, on random batches of one size;
their steps are interleaved. The result is the ratio of the median times, the interquartile range of
the ratios of each round, and the TFLOP/s of both sides. The hand-written model is what a PyTorch
user would write: `nn.Linear`, `scaled_dot_product_attention`, a tied head, `torch.autocast` for
bf16.

    python benchmarks/one_device.py --layers 12 --hidden 768 --sequence 256 --rounds 15
    python benchmarks/one_device.py --compile
    python benchmarks/one_device.py --optimizer sgd --scores recompute
    python benchmarks/one_device.py --device cuda --precision bf16 --layers 24 \\
        --hidden 1024 --sequence 1024 --batch 16
"""

from __future__ import annotations

import argparse
import json
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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
        query, key, value = (
            layer(normed).view(shape).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(batch, sequence, hidden))
        return x + self.down(F.gelu(self.up(self.feed_forward_norm(x))))


class HandWrittenGPT(nn.Module):
    """The zoo's `gpt` as one would write it by hand."""

    def __init__(
        self, layers: int, hidden: int, heads: int, vocabulary: int, sequence: int
    ) -> None:
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


SCORES = ("keep", "recompute", "auto")
CLUSTERS = {"cpu": "cpu-local", "cuda": "h100-80gb"}
"""Preset of the cluster that the program is planned for, by type of device."""


def write_program(arguments: argparse.Namespace, folder: Path) -> Path:
    """Return the folder of the program that autopipe generates for one device."""
    model = folder / "gpt.onnx"
    plan = folder / "gpt.plan"
    names = ("layers", "hidden", "heads", "vocabulary", "sequence")
    sizes = [f"{name}={getattr(arguments, name)}" for name in names]
    settings = [word for size in (*sizes, "loss=true", "weights=none") for word in ("--set", size)]
    autopipe("zoo", "build", "gpt", "-o", model, *settings)
    batch = ["--batch-size", arguments.batch, "--micro-batches", 1]
    choices = ["--optimizer", arguments.optimizer, "--set", f"precision={arguments.precision}"]
    choices += ["--set", f"loss.scores={arguments.scores}"]
    choices += ["--memory-limit", arguments.memory_limit] if arguments.memory_limit else []
    autopipe(
        "plan",
        model,
        "--gpus",
        1,
        "--cluster",
        CLUSTERS[arguments.device],
        *batch,
        *choices,
        "-o",
        plan,
    )
    autopipe("codegen", plan)
    return plan / "program"


def generated_step(arguments: argparse.Namespace, program: Path) -> Callable[[], None]:
    """Return a function that runs one training step of the generated program."""
    sys.path.insert(0, str(program))
    sys.argv = [str(program / "rank_000.py"), "--device", arguments.device]
    sys.argv += ["--compile"] if arguments.compile else []
    sys.argv += ["--cuda-graphs" if arguments.cuda_graphs else "--no-cuda-graphs"]
    names = runpy.run_path(str(program / "rank_000.py"))
    rank = names["rank"]
    step = names["step"]
    rank.set_up()
    return lambda: rank.run(step)


def make_optimizer(settings: Mapping[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    """Return torch's optimizer with the hyperparameters `settings` of the generated program's
    manifest.

    It is fused where the program's is: on CUDA. On a CPU both sides leave that to torch.
    """
    fused = True if all(each.is_cuda for each in model.parameters()) else None
    common = {"lr": settings["lr"], "weight_decay": settings["weight_decay"], "fused": fused}
    if settings["name"] == "sgd":
        return torch.optim.SGD(model.parameters(), momentum=settings["momentum"], **common)
    return torch.optim.AdamW(
        model.parameters(), betas=tuple(settings["betas"]), eps=settings["eps"], **common
    )


def make_model(arguments: argparse.Namespace) -> HandWrittenGPT:
    """Return the hand-written model on the device."""
    sizes = (
        arguments.layers,
        arguments.hidden,
        arguments.heads,
        arguments.vocabulary,
        arguments.sequence,
    )
    return HandWrittenGPT(*sizes).to(arguments.device)


def hand_written_step(
    arguments: argparse.Namespace, model: HandWrittenGPT, settings: Mapping[str, Any]
) -> Callable[[], None]:
    """Return a function that runs one training step of the model: forward, backward, update, loss
    read.
    """
    device = torch.device(arguments.device)
    forward = torch.compile(model, fullgraph=True, dynamic=False) if arguments.compile else model
    optimizer = make_optimizer(settings, model)
    shape = (arguments.batch, arguments.sequence)
    narrow = arguments.precision == "bf16"

    def step() -> None:
        tokens, labels = (
            torch.randint(arguments.vocabulary, shape, device=device) for _ in range(2)
        )
        with torch.autocast(device.type, torch.bfloat16, enabled=narrow):
            loss = forward(tokens, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    return step


def step_flops(arguments: argparse.Namespace, model: nn.Module) -> int:
    """Return the operations of a training step: 6 per parameter and token, and those of attention.

    Attention is two products of sequence by hidden per token and layer forward, and four backward,
    without a discount for its causal mask. Nothing that is computed twice is counted twice.
    """
    tokens = arguments.batch * arguments.sequence
    parameters = sum(each.numel() for each in model.parameters())
    attention = 12 * arguments.layers * arguments.hidden * arguments.sequence
    return (6 * parameters + attention) * tokens


def interleaved(
    ours: Callable[[], None], theirs: Callable[[], None], rounds: int, device: str
) -> tuple[list[float], list[float]]:
    """Return the seconds of each round of `ours` and of `theirs`, which run in turns after two
    rounds of warm-up.

    The clock is read when the device has finished: a step may return while its last kernels run,
    and their time would count for the step that follows.
    """
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 2):
        for place in (0, 1) if turn % 2 else (1, 0):
            start = time.perf_counter()
            (ours, theirs)[place]()
            if device == "cuda":
                torch.cuda.synchronize()
            if turn >= 2:
                times[place].append(time.perf_counter() - start)
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("layers", 12), ("hidden", 768), ("heads", 12), ("vocabulary", 50257), ("sequence", 256), ("batch", 2),
        ("rounds", 15),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--optimizer", choices=("adamw", "sgd"), default="adamw", help="of both sides"
    )
    parser.add_argument(
        "--precision", choices=("fp32", "bf16"), default="fp32", help="of both sides"
    )
    parser.add_argument(
        "--scores",
        choices=SCORES,
        default="auto",
        help="whether the program keeps the loss's scores or recomputes them",
    )
    parser.add_argument(
        "--compile", action="store_true", help="compile both sides by torch.compile"
    )
    parser.add_argument(
        "--cuda-graphs", action="store_true", help="replay the generated side as CUDA graphs"
    )
    parser.add_argument(
        "--program",
        type=Path,
        metavar="DIR",
        help="the generated program, of a model of these sizes",
    )
    parser.add_argument(
        "--memory-limit", help="memory of the device for which the program is planned, such as 3GiB"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="threads of both sides"
    )
    arguments = parse_arguments(
        parser, layers=1, hidden=32, heads=2, vocabulary=64, sequence=16, batch=1, rounds=1
    )
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as scratch:
        program = arguments.program or write_program(arguments, Path(scratch))
        settings = json.loads((program / "manifest.json").read_text(encoding="utf-8"))["optimizer"]
        ours = generated_step(arguments, program)
        model = make_model(arguments)
        theirs = hand_written_step(arguments, model, settings)
        times = interleaved(ours, theirs, arguments.rounds, arguments.device)
    mine, hand = map(statistics.median, times)
    ratios = sorted(own / other for own, other in zip(*times, strict=True))
    # Interquartile range of the rounds' ratios.
    middle = (
        ratios[len(ratios) // 4],
        ratios[-1 - len(ratios) // 4],
    )
    tera = step_flops(arguments, model) / 1e12
    figures = {
        "generated_s": mine,
        "hand_written_s": hand,
        "ratio": mine / hand,
        "ratios": middle,
        "generated_tflops": tera / mine,
        "hand_written_tflops": tera / hand,
    }
    print(json.dumps(figures | vars(arguments), default=str))


if __name__ == "__main__":
    main()
