"""What the generated pipeline costs: ranks under 1F1B against `torch.distributed.pipelining` on the
same stages.

Both run in the same processes over gloo, with the same stage functions (those that autopipe
generated), the same weights, optimizer and micro-batches; steps are interleaved, and the figure is
the ratio of the medians on rank 0.

    python benchmarks/pipeline_step.py --layers 8 --hidden 256 --rounds 15
"""

from __future__ import annotations

import argparse
import json
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from command_line import autopipe, parse_arguments
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


class GeneratedStage(nn.Module):
    """A generated stage as a module: its parameters registered, its forward called."""

    def __init__(self, module: ModuleType, p: Any) -> None:
        super().__init__()
        self._module = module
        self._p = p
        self.weights = nn.ParameterList(
            nn.Parameter(getattr(p, name).detach().clone()) for name in module.PARAMETERS
        )
        self._held = type(p)(**vars(p))
        for name, weight in zip(module.PARAMETERS, self.weights, strict=True):
            setattr(self._held, name, weight)

    def forward(self, *arguments: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        extra = () if labels is None else (labels,)
        # The peer sends only contiguous tensors; ours makes them so when it sends.
        results = tuple(
            each.contiguous() for each in self._module.forward(self._held, *arguments, *extra)
        )
        if labels is not None:
            return results[0].reshape(1)  # The peer joins the micro-batches' outputs along axis 0.
        return results[0] if len(results) == 1 else results


def peer_step(rank: Any, module: ModuleType, p: Any, micro_batches: int) -> Callable[[], None]:
    """One training step under torch's Schedule1F1B on this rank's stage."""
    number = rank.number
    ranks = rank.manifest.world_size
    last = number == ranks - 1
    stage_module = GeneratedStage(module, p)
    # The peer sends a gradient back only where the example says that it wants one.
    inputs = [_example(dtype, shape) for dtype, shape in module.INPUTS.values()]
    activations = tuple(inputs[:-1]) if last else tuple(inputs)
    outputs = tuple(_example(dtype, shape or (1,)) for dtype, shape in module.OUTPUTS.values())
    stage = PipelineStage(
        stage_module, number, ranks, torch.device("cpu"), input_args=activations,
        output_args=outputs[0] if len(outputs) == 1 else outputs,
    )  # fmt: skip
    schedule = Schedule1F1B(stage, micro_batches, loss_fn=lambda output, target: output.sum())
    optimizer = torch.optim.SGD(stage_module.parameters(), lr=0.01)
    batch = (
        inputs[-1].detach().repeat_interleave(micro_batches, dim=0) if number == 0 or last else None
    )

    def step() -> None:
        losses: list[torch.Tensor] = []
        if number == 0:
            schedule.step(batch)
        elif last:
            schedule.step(target=batch, losses=losses, labels=batch)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total = torch.tensor([float(torch.stack(losses).mean()) if losses else 0.0])
        dist.all_reduce(total)

    return step


def _example(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, requires_grad=dtype.is_floating_point)


def worker(program: Path, rounds: int) -> None:
    """Run both pipelines in turns on this rank; rank 0 prints the medians."""
    import os

    number = int(os.environ["RANK"])
    torch.set_num_threads(1)
    sys.path.insert(0, str(program))
    sys.argv = [f"rank_{number:03d}.py", "--device", "cpu"]
    names = runpy.run_path(str(program / f"rank_{number:03d}.py"))
    rank = names["rank"]
    step = names["step"]
    rank.set_up()
    module = names[f"stage_{number:02d}"]
    peer = peer_step(rank, module, rank.stages[number].p, rank.manifest.micro_batches)
    runs = (lambda: rank.run(step), peer)
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 2):
        for place in (0, 1) if turn % 2 else (1, 0):
            dist.barrier()
            start = time.perf_counter()
            runs[place]()
            dist.barrier()
            if turn >= 2:
                times[place].append(time.perf_counter() - start)
    if number == 0:
        ours, theirs = (statistics.median(each) for each in times)
        print(
            json.dumps({"generated_s": ours, "torch_pipelining_s": theirs, "ratio": ours / theirs}),
            flush=True,
        )
    rank.transport.stop()


def build(arguments: argparse.Namespace, folder: Path) -> Path:
    """The generated program: a Llama (its head is not tied, so that the peer runs it) in a stage a
    rank under 1F1B.
    """
    model = folder / "llama.onnx"
    plan = folder / "llama.plan"
    names = ("layers", "hidden", "heads", "vocabulary", "sequence")
    sizes = [f"{name}={getattr(arguments, name)}" for name in names]
    settings = [word for size in (*sizes, "loss=true", "weights=none") for word in ("--set", size)]
    autopipe("zoo", "build", "llama", "-o", model, *settings)
    size = arguments.micro_batches * arguments.micro_batch_size
    batch = ["--batch-size", size, "--micro-batches", arguments.micro_batches]
    one_device_a_stage = (
        "--strategy",
        "pipedream",
        "--set",
        "strategy.replicate=false",
        "--schedule",
        "1f1b",
    )
    autopipe(
        "plan",
        model,
        "--gpus",
        arguments.ranks,
        "--cluster",
        "cpu-local",
        *one_device_a_stage,
        *batch,
        "-o",
        plan,
    )
    autopipe("codegen", plan, "--style", "flat")
    return plan / "program"


def main() -> None:
    """Build the program, start its ranks of this file, let rank 0 print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("layers", 8), ("hidden", 256), ("heads", 8), ("vocabulary", 2000), ("sequence", 128),
        ("micro-batches", 8), ("micro-batch-size", 2), ("ranks", 4), ("rounds", 15),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parse_arguments(
        parser,
        layers=4,
        hidden=32,
        heads=2,
        vocabulary=64,
        sequence=16,
        micro_batches=4,
        micro_batch_size=1,
        ranks=2,
        rounds=1,
    )
    if arguments.worker:
        worker(arguments.worker, arguments.rounds)
        return
    with tempfile.TemporaryDirectory() as scratch:
        program = build(arguments, Path(scratch))
        words = [__file__, "--worker", str(program), "--rounds", str(arguments.rounds)]
        start = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(arguments.ranks),
        ]
        subprocess.run([*start, *words], check=True)


if __name__ == "__main__":
    main()
