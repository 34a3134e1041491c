"""The plan that is chosen for a model of the zoo, asked for without a strategy or a schedule."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from autopipe.cli.bench.zoo_graph import Settings
from autopipe.configs import zoo
from autopipe.configs.cluster import build_cluster, cluster_preset
from autopipe.ir.problem import Mode
from autopipe.passes.auto.choose import choose
from autopipe.passes.pipeline import PlanResult, Request


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked for: a model with its sizes, devices of a preset, and the samples of a step."""

    model: str
    settings: Settings
    preset: str
    devices: int
    batch: int
    precision: str = "fp32"
    mode: Mode = Mode.TRAIN
    memory_limit: int | None = None
    """Bytes a device; its own memory where there is none."""


@cache
def chosen(asked: Asked) -> PlanResult:
    """The plan that is chosen. Raises InfeasibleError where there is none."""
    with asked_for(asked) as request:
        return choose(request)


@contextmanager
def asked_for(asked: Asked) -> Iterator[Request]:
    """The request, as long as its model's file is there."""
    train = asked.mode is Mode.TRAIN
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        zoo.build(zoo.configure(asked.model, {**dict(asked.settings), "loss": train, "weights": "none"})).save(path)
        yield Request(
            path,
            build_cluster(cluster_preset(asked.preset), asked.devices, None, None),
            strategy=None,
            scheduler=None,
            mode=asked.mode,
            batch_size=asked.batch,
            precision=asked.precision,
            memory_limit=asked.memory_limit,
        )


def decision(found: PlanResult) -> str:
    """The plan in a few words."""
    summary, request = found.plan.summary, found.request
    again = sum(stage.recompute for stage in found.plan.placement.stages)
    words = [
        f"{summary.strategy} under {summary.schedule}",
        f"{summary.stages} stages of {_sizes(found)} devices, depth {summary.depth}",
        f"{summary.micro_batches} micro-batches of {summary.micro_batch_size}",
        *([f"{again} stages with recomputation"] if again else []),
        *(["state shared out"] if request.optimizer.shard else []),
    ]
    return ", ".join(words)


def _sizes(found: PlanResult) -> str:
    return ", ".join(str(len(stage.devices)) for stage in found.plan.placement.stages)
