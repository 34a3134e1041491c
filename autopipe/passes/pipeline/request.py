"""The request for a plan: the model, the cluster, and all settings that affect the plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from autopipe.ir.cluster import Cluster
from autopipe.ir.measured_costs import Costs
from autopipe.ir.problem import Constraint, Mode, Optimizer, Scores
from autopipe.ir.training import DataSettings, Evaluation, LRScheduler, Training
from autopipe.passes.frontend import CrossEntropy
from autopipe.passes.registry import Scheduler, Strategy


@dataclass(frozen=True, slots=True)
class Request:
    """The model, the cluster and the settings of a plan. If a field is None, the passes decide its
    value.
    """

    model: Path
    cluster: Cluster
    strategy: Strategy | None
    scheduler: Scheduler | None
    dims: tuple[tuple[str, int], ...] = ()
    batch_axes: tuple[tuple[str, int | None], ...] = ()
    fixed_inputs: tuple[tuple[str, bool | int | float], ...] = ()
    frozen: tuple[str, ...] = ()
    trainable: tuple[str, ...] = ()
    mode: Mode | None = None
    training_graph: bool | None = None
    """True if Dropout and BatchNormalization behave as the file declares, which may be as in
    training; False if they behave as in evaluation. None: as in evaluation for inference, and
    otherwise as the file declares.
    """
    loss: str | CrossEntropy | None = None
    """Name of the output to minimise, or a cross-entropy to add to the model; None for the loss
    that the model itself defines.
    """
    normalize: str = "auto"
    """Value of the key `loss.normalize`, which determines how the losses of micro-batches are
    combined into the loss of a step.
    """
    scores: Scores | None = None
    """`keep` if losses save their logits for backward, `recompute` if they recompute them; None if
    the passes choose.
    """
    batch_size: int | None = None
    micro_batches: int | None = None
    micro_batch_size: int | None = None
    optimizer: Optimizer = field(default=Optimizer())
    lr_scheduler: LRScheduler = field(default=LRScheduler())
    training: Training = field(default=Training())
    shard_open: bool = True
    """True if a search may shard the optimizer state although `optimizer` does not shard it."""
    eps_open: bool = False
    """True if `optimizer.eps` is not given. It is then increased for Adam if float16 weights are
    trained.
    """
    precision: str = "fp32"
    compiled: bool = False
    recompute: str | None = None
    memory_limit: int | None = None
    constraints: tuple[Constraint, ...] = ()
    time_limit: float | None = None
    solver: str = "auto"
    seed: int = 0
    costs: Costs | None = None
    """Measured costs of the cluster's devices; None to use only their data sheets."""
    data: DataSettings = field(default=DataSettings())
    evaluation: Evaluation = field(default=Evaluation())


def strategy_and_scheduler(request: Request) -> tuple[Strategy, Scheduler]:
    """Return (strategy, scheduler) of a request that names both. Raise ValueError if one is
    missing.
    """
    if request.strategy is None or request.scheduler is None:
        raise ValueError("the request lacks a strategy or a scheduler")
    return request.strategy, request.scheduler
