"""Updates of ranks are those of plain torch on one device: rates, clipping, and what comes of
them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from autopipe.backends.torch.checkpoint import CheckpointReader, checkpoint_path, read_checkpoint
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Optimizer, ParameterGroup
from autopipe.ir.schedule import Schedule
from autopipe.ir.training import LRScheduler, Training
from tests.distributed.support.builder import evaluate
from tests.distributed.support.pool import Pools
from tests.distributed.support.running import (
    batch_of,
    drawn_parameters,
    forwards_first,
    micro_batches_of,
    report_lines,
    schedule_of,
    write,
)
from tests.distributed.test_optimizer_shares import MICRO_BATCHES, PLACEMENTS, cut, uneven

pytestmark = pytest.mark.distributed

STEPS = 8
TOLERANCE = 1e-9
WARMUP = 3
MAX_NORM = 0.3
COSINE = LRScheduler(warmup_steps=WARMUP, decay_type="cosine", total_steps=STEPS)
CLIPPED = Training(max_norm=MAX_NORM)
ADAMW = Optimizer("adamw", lr=0.05, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
GROUPS = (ParameterGroup("w[24]", weight_decay=0.0), ParameterGroup("re:w[13]", lr_factor=0.5))
OTHERS = {
    "adam": Optimizer("adam", lr=0.05, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
    "nesterov": Optimizer("sgd", lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "lion": Optimizer("lion", lr=0.01, betas=(0.9, 0.99), weight_decay=0.1),
    "muon": Optimizer("muon", lr=0.05, momentum=0.95, nesterov=True, weight_decay=0.1),
}


class Lion(torch.optim.Optimizer):
    """As the paper spells it, tensor by tensor."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            (first, second) = group["betas"]
            rate = group["lr"]
            for each in group["params"]:
                average = self.state[each].setdefault("average", torch.zeros_like(each))
                update = torch.sign(first * average + (1 - first) * each.grad)
                each.sub_(rate * (update + group["weight_decay"] * each))
                average.copy_(second * average + (1 - second) * each.grad)


def optimizers_of(
    settings: Optimizer, trained: dict[str, torch.Tensor]
) -> list[torch.optim.Optimizer]:
    """Torch's, with a group for each parameter, as one writes it by hand."""
    forms = []
    for name, tensor in trained.items():
        decay = settings.weight_decay
        factor = 1.0
        if settings.groups and name in ("w2", "w4"):
            decay = 0.0
        elif settings.groups and name in ("w1", "w3"):
            factor = 0.5
        forms.append({"params": [tensor], "weight_decay": decay, "lr": settings.lr * factor})
    if settings.name == "sgd":
        return [torch.optim.SGD(forms, momentum=settings.momentum, nesterov=settings.nesterov)]
    if settings.name == "lion":
        return [Lion(forms, settings.lr, settings.betas)]
    kind = torch.optim.Adam if settings.name == "adam" else torch.optim.AdamW
    if settings.name != "muon":
        return [kind(forms, betas=settings.betas, eps=settings.eps)]
    hidden = (5, 4), (4, 7)  # The table (7, 5) is none.
    by_muon = [form for form in forms if form["params"][0].shape in hidden]
    others = [form for form in forms if form["params"][0].shape not in hidden]
    muon = torch.optim.Muon(by_muon, momentum=settings.momentum, adjust_lr_fn="match_rms_adamw")
    return [muon, kind(others, betas=settings.betas, eps=settings.eps)]


@dataclass(frozen=True, slots=True)
class Updates:
    """The figures of each step, and the weights and their averages in the end."""

    losses: list[float]
    rates: list[float]
    norms: list[float]
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    averages: dict[str, np.ndarray] = field(default_factory=dict)


def cosine(step: int) -> float:
    """transformers' get_cosine_schedule_with_warmup."""
    if step < WARMUP:
        return step / WARMUP
    return 0.5 * (1.0 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def by_torch(
    graph: Graph,
    loss: str,
    folder: Path,
    batch: dict[str, np.ndarray],
    settings: Optimizer,
    training: Training,
) -> Updates:
    """The same steps in plain torch, all micro-batches of a step in one mean."""
    parameters = drawn_parameters(graph, folder)
    names = [each.value.name for each in graph.parameters if each.trainable]
    trained = {name: parameters[name].requires_grad_() for name in names}
    averaged = AveragedModel(
        torch.nn.ParameterDict(trained),
        multi_avg_fn=get_ema_multi_avg_fn(training.ema_decay or 0.0),
    )
    optimizers = optimizers_of(settings, trained)
    schedulers = [LambdaLR(each, cosine) for each in optimizers]
    found = Updates([], [], [])
    count = MICRO_BATCHES * training.gradient_accumulation_steps
    for _ in range(STEPS):
        parts = [
            evaluate(graph, parameters | inputs)[loss]
            for inputs in micro_batches_of(graph, batch, count)
        ]
        total = torch.stack(parts).mean()
        gradients = torch.autograd.grad(total, list(trained.values()))
        for tensor, gradient in zip(trained.values(), gradients, strict=True):
            tensor.grad = gradient
        found.losses.append(total.item())
        found.rates.append(settings.lr * cosine(schedulers[0].last_epoch))
        found.norms.append(
            torch.nn.utils.clip_grad_norm_(trained.values(), training.max_norm or math.inf).item()
        )
        for each in optimizers:
            each.step()
        averaged.update_parameters(torch.nn.ParameterDict(trained))
        for scheduler in schedulers:
            scheduler.step()
    found.weights.update({name: tensor.detach().numpy() for name, tensor in trained.items()})
    found.averages.update(
        {name: tensor.detach().numpy() for name, tensor in averaged.module.items()}
    )
    return found


def two_pipelines(graph: Graph) -> Placement:
    """The second the other way round and cut elsewhere: each rank has two stages, and the table in
    both.
    """
    count = len(graph.nodes)
    low = tuple(range(4))
    high = tuple(range(4, count))
    first = tuple(range(6))
    second = tuple(range(6, count))
    stages = [Stage(low, (0,), 12), Stage(high, (1,), 12)]
    return Placement(
        (*stages, Stage(first, (1,), 12, (), False, 1), Stage(second, (0,), 12, (), False, 1))
    )


def placed(name: str) -> tuple[Graph, str, Placement, Schedule]:
    graph, loss = uneven()
    if name == "two pipelines":
        placement = two_pipelines(graph)
        return graph, loss, placement, forwards_first(graph, placement, MICRO_BATCHES)
    own = (
        cut(graph, 4, [(0, 1, 2, 3)], columns=2)
        if name == "tensor and data"
        else cut(graph, 4, PLACEMENTS[name])
    )
    return graph, loss, own, schedule_of(graph, own, MICRO_BATCHES)


@dataclass(frozen=True, slots=True)
class Runs:
    pools: Pools
    folder: Path
    settings: Optimizer
    training: Training = CLIPPED

    def check(self, name: str, *flags: object, begun: str | None = None) -> Updates:
        """Run under a placement, and compare each step's figures, and the weights in the end, with
        torch's. The first half of the steps may have been done under another one, `begun`.
        """
        batch = batch_of(placed(name)[0], MICRO_BATCHES * self.training.gradient_accumulation_steps)
        np.savez(self.folder / "batch.npz", **batch)  # type: ignore[arg-type]
        saved = self.folder / f"{name} saved"
        if begun is not None:
            self.run(begun, saved, STEPS // 2)
            flags = (*flags, "--resume")
        graph, loss, program, lines = self.run(name, saved, STEPS, *flags)
        expected = by_torch(graph, loss, program, batch, self.settings, self.training)
        keys = {"loss": expected.losses, "learning_rate": expected.rates}
        if self.training.max_norm is not None:
            keys["grad_norm"] = expected.norms
        for key, theirs in keys.items():
            theirs = theirs[STEPS - len(lines) :]
            np.testing.assert_allclose(
                [line[key] for line in lines], theirs, rtol=TOLERANCE, err_msg=f"{name}: {key}"
            )  # type: ignore[arg-type]
        for kept, numbers in (("", expected.weights), ("ema", expected.averages)):
            if kept and self.training.ema_decay is None:
                continue
            found = stored(saved, kept)
            for parameter, array in numbers.items():
                np.testing.assert_allclose(
                    found[parameter], array, rtol=1e-7, atol=1e-9, err_msg=f"{name}: {parameter}"
                )
        return expected

    def run(
        self, name: str, saved: Path, steps: int, *flags: object
    ) -> tuple[Graph, str, Path, list[dict[str, object]]]:
        """The graph, its loss, the program, and the lines of its report."""
        graph, loss, placement, schedule = placed(name)
        program = self.folder / name
        report = self.folder / f"{name}.jsonl"
        how = {"lr_scheduler": COSINE, "training": self.training}
        write(graph, placement, schedule, loss, program, optimizer=self.settings, **how)  # type: ignore[arg-type]
        arguments = (
            "--device",
            "cpu",
            "--data",
            self.folder / "batch.npz",
            "--steps",
            steps,
            "--report",
            report,
        )
        self.pools.of(placement.devices).run(program, *arguments, "--checkpoint", saved, *flags)
        return graph, loss, program, report_lines(report)


def stored(folder: Path, state: str) -> dict[str, np.ndarray]:
    """What the checkpoint after the last step holds of each trained parameter: its numbers, or a
    state of them.
    """
    path = checkpoint_path(folder, STEPS)
    checkpoint = read_checkpoint(path)
    reader = CheckpointReader(path, checkpoint)
    return {
        each.name: reader.read(tensor)
        for each in checkpoint.parameters
        if each.trainable
        for name, tensor in (("", each.value), *each.state)
        if name == state
    }


@pytest.mark.parametrize("shard", [False, True], ids=["whole", "in shares"])
def test_rates_norms_and_losses_are_torchs(pools: Pools, tmp_path: Path, shard: bool) -> None:
    runs = Runs(pools, tmp_path, replace(ADAMW, shard=shard, groups=GROUPS))
    for name in (*PLACEMENTS, "tensor and data", "two pipelines"):
        expected = runs.check(name)
        assert min(expected.norms) < MAX_NORM < max(expected.norms), (
            "some steps are clipped, and some are not"
        )


@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers(pools: Pools, tmp_path: Path, name: str) -> None:
    settings = replace(OTHERS[name], shard=name != "muon", groups=GROUPS)
    Runs(pools, tmp_path, settings).check("stages of replicas")


def test_gradients_of_several_batches_and_averaged_weights(pools: Pools, tmp_path: Path) -> None:
    training = Training(max_norm=MAX_NORM, gradient_accumulation_steps=3, ema_decay=0.7)
    for shard, name, *flags in (
        (True, "tensor and data"),
        (False, "two pipelines"),
        (False, "stages of replicas", "--blocking"),
    ):
        Runs(pools, tmp_path, replace(ADAMW, shard=bool(shard)), training).check(str(name), *flags)


def test_a_run_goes_on_under_another_plan(pools: Pools, tmp_path: Path) -> None:
    training = Training(max_norm=MAX_NORM, gradient_accumulation_steps=2, ema_decay=0.7)
    settings = replace(ADAMW, shard=True, groups=GROUPS)
    Runs(pools, tmp_path, settings, training).check("tensor and data", begun="stages of replicas")
    muon = tmp_path / "muon"
    muon.mkdir()
    Runs(pools, muon, OTHERS["muon"], training).check(
        "two pipelines", begun="stages of three and one"
    )
