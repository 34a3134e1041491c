"""Plans of whole models by NCCL's and CUDA's rules: none stops, and few communicators join many
ranks.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from autopipe.api.plan_folder import open_plan
from autopipe.backends.torch.runtime.communication.communicators import rank_pairs_of_channels
from autopipe.backends.torch.runtime.manifest import Manifest, StageEntry
from autopipe.backends.torch.runtime.step.gradients import process_groups_of_program
from autopipe.cli.main import main
from autopipe.ir.program import Program
from autopipe.passes.lower.lower import lower
from tests.cli.command_line import CommandLine
from tests.cli.test_digests import PLACEMENTS, build
from tests.distributed.support.zoo import SIZES
from tests.passes.lower.nccl import Device, stopped

NAMES = ("graphpipe", "grid", "pipedream", "tepdist, 2 stages")


def program_of(folder: Path, proven: bool = True) -> Program:
    planned = open_plan(folder)
    plan = planned.plan
    problem = planned.problem
    return lower(
        problem.graph, plan.placement, plan.schedule, problem.loss, problem.optimizer.shard, proven
    )


def ends(model: str, placement: str, schedule: str) -> None:
    words = ("--gpus", "4", "--batch-size", "32", "--micro-batches", "8", "--schedule", schedule)
    assert main(["plan", f"{model}.onnx", *PLACEMENTS[placement], *words, "-o", "plan", "-q"]) == 0
    program = program_of(Path("plan"))
    assert not stopped(program, 8)
    assert not stopped(program, 32)


@pytest.mark.parametrize("model", ["mt5", "unet"])
def test_models_with_skip_connections_end(command_line: CommandLine, model: str) -> None:
    build(model)
    ends(model, "graphpipe", "1f1b")


@pytest.mark.sweep
@pytest.mark.parametrize("placement", NAMES)
@pytest.mark.parametrize("model", SIZES)
def test_every_model_ends(command_line: CommandLine, model: str, placement: str) -> None:
    build(model)
    ends(model, placement, "1f1b")


@pytest.mark.sweep
@pytest.mark.parametrize("schedule", ["zb_h1", "tessel"])
def test_other_schedules_end(command_line: CommandLine, schedule: str) -> None:
    build("gpt")
    ends("gpt", "grid", schedule)


def test_a_rank_of_many_has_few_communicators(command_line: CommandLine) -> None:
    """Llama-7B on 1,024 GPUs: 16 stages, each split by 8 and copied 8 times."""
    done = command_line.done
    done(
        "zoo",
        "build",
        "llama",
        "-o",
        "llama.onnx",
        "--set",
        "size=7b",
        "--set",
        "weights=none",
        "--set",
        "loss=true",
    )
    grid = ("--strategy", "grid", "--set", "strategy.pipeline=16", "--set", "strategy.tensor=8")
    many = (
        "--cluster",
        "h100-80gb",
        "--gpus",
        1024,
        "--batch-size",
        1024,
        "--micro-batches",
        32,
        "--schedule",
        "1f1b",
    )
    done("plan", "llama.onnx", *grid, *many, "--set", "precision=bf16", "-o", "plan")
    program = program_of(Path("plan"), proven=False)
    for rank in (0, 500, 1023):
        streams = [
            stream
            for stream in Device(program, program.ranks[rank]).streams
            if isinstance(stream, tuple)
        ]
        assert len([stream for stream in streams if stream[0] == "pair"]) <= 4
        assert len(streams) <= 8
    paths = Counter(rank for path in rank_pairs_of_channels(program.channels) for rank in path[:2])
    assert max(paths.values()) <= 8
    entries = [
        StageEntry(each.devices, each.pipeline, each.meshes(), whole=False)
        for each in program.stages
    ]
    shards = [each.shards for each in program.ranks]
    made = SimpleNamespace(train=True, stages=entries, shards=shards, parameters=program.parameters)
    groups = Counter(
        rank
        for group in process_groups_of_program(cast(Manifest, made))
        if len(group) > 1
        for rank in group
    )
    assert max((paths + groups).values()) <= 20
