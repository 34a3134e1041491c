"""Input of strategies and schedulers: the model, cluster and request, and no decision."""

from __future__ import annotations

import enum
import fnmatch
import math
import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from autopipe.ir.cluster import Cluster, nccl_bytes
from autopipe.ir.codec import Above, Amount, AtLeast, AtMost, Index, OmitDefault
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import COUNTED_LABELS, Graph
from autopipe.ir.measured_costs import Costs
from autopipe.ir.training import LRScheduler, Training


def matches(pattern: str, name: str, key: str) -> bool:
    """True if the whole name is one of the pattern's. Raises ConfigurationError that names the
    `key` under which the pattern was given where it is no regular expression.
    """
    if pattern.startswith("re:"):
        try:
            return re.fullmatch(pattern[3:], name) is not None
        except re.error as error:
            raise ConfigurationError(
                f"{key}: {pattern!r} is no regular expression: {error}"
            ) from error
    return fnmatch.fnmatchcase(name, pattern)


Size = Annotated[int, AtLeast(1), AtMost(2**40)]
Extent = Annotated[int, AtLeast(0), AtMost(2**40)]
"""Elements along a dimension, which may be none: the cache of a decoder before the first token."""


class Mode(enum.Enum):
    """A step trains (forward, backward, update) or infers (forward alone)."""

    TRAIN = "train"
    INFER = "infer"


Scores = Literal["keep", "recompute"]
"""Forms of a cross-entropy: it keeps its scores (logits) for backward, or recomputes them there, to
save memory.
"""
SCORES: tuple[Scores, Scores] = ("keep", "recompute")


@dataclass(frozen=True, slots=True)
class Measured:
    """Time of one node on one kind of device: measured (`known`), or the roofline's times `scale`,
    a factor for forward and one for backward.
    """

    device: str
    known: bool
    points: tuple[tuple[float, float, float], ...] = ()
    """The part of the node that a device does, its seconds of forward and of backward; ascending.
    () where the roofline's count.
    """
    scale: tuple[float, float] = (1.0, 1.0)


BACKWARD_OPERATORS = 2
"""Operators that the host starts in backward, per operator of forward. A layer of the programs
generated for BERT and GPT dispatches 2.0 to 2.1 ATen operators in backward for each one in forward,
in fp32 and in bf16.
"""


@dataclass(frozen=True, slots=True)
class Work:
    """Cost of one evaluation of one node, whatever the device: the annotation that makes a graph a
    costed graph. All figures are for the whole node on one micro-batch; a node split into n equal
    parts does a share of 1/n each.

    `kind` is `Operator.kind`; bytes are those read and written, parameters included; `measured` has
    times on each kind of device, where plans use measured costs.
    """

    kind: str
    forward_flops: float
    backward_flops: float
    forward_bytes: float
    backward_bytes: float
    kept_bytes: int
    """Bytes of values that this node makes backward keep, counted at the first node that does."""
    measured: tuple[Measured, ...] = ()
    launches: float = 1.0
    """Kernels that a forward starts: a part of one for each node of several that run as one kernel.
    """
    operators: float = 1.0
    """Operators that the host starts in a forward, views included."""
    backward_operators: float = 0.0
    """The same in a backward."""
    product_rate: float = 1.0
    """Fraction of the device's rate of products that the shapes of the operator permit."""
    recomputed_flops: float = 0.0
    """FLOPs of backward that compute values of forward again, such as the scores of an attention.
    """


FIRST_LOSS_SCALE = 2.0**16
GROUPS = "optimizer.groups"
"""The key of groups, in errors."""


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Settings of the parameters whose names match; of several groups that match the first
    counts.
    """

    match: str
    """A glob over names of parameters, or a regular expression after `re:`."""
    weight_decay: Annotated[Amount | None, OmitDefault()] = None
    """In place of the optimizer's."""
    lr_factor: Annotated[Amount, OmitDefault()] = 1.0
    """Factor of the learning rate."""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """How parameters are updated, as torch's optimizers of these names do it."""

    name: Literal["adamw", "adam", "sgd", "lion", "muon"] = "sgd"
    """The algorithm. `muon` is for matrices that one device holds whole, but for tables; the rest
    goes by AdamW at the same rate.
    """
    lr: Amount = 0.01
    """Learning rate."""
    momentum: Amount = 0.0
    """Momentum of `sgd` and `muon`."""
    nesterov: Annotated[bool, OmitDefault()] = False
    """Nesterov's momentum, of `sgd` and `muon`."""
    weight_decay: Amount = 0.0
    """Weight decay: added to the gradient by `sgd` and `adam`, decoupled from it by the others."""
    betas: tuple[Amount, Amount] = (0.9, 0.999)
    """Decay rates of averages, below 1."""
    eps: Annotated[float, Above(0)] = 1e-8
    """Term added to the denominator of `adamw`, `adam`."""
    shard: bool = False
    """True if devices that hold the same block of a parameter keep a share of its state each, and
    update that share (ZeRO-1: Rajbhandari et al., "ZeRO: Memory optimizations toward training
    trillion parameter models", SC 2020, section 5.1); else each keeps all of it.
    """
    groups: Annotated[tuple[ParameterGroup, ...], OmitDefault()] = ()
    """Parameters with a weight decay or rate of their own, such as `{match: '*.bias', weight_decay:
    0}`.
    """
    loss_scale: Annotated[float, Above(0), OmitDefault()] = FIRST_LOSS_SCALE
    """First scale of the loss under precision `fp16`, whose small gradients would be zero: halved
    where a gradient overflows, which skips the step, doubled after 2,000 steps without.
    """

    @property
    def states(self) -> int:
        """fp32 numbers kept for each parameter beside it and its gradient."""
        return {"adamw": 2, "adam": 2, "lion": 1, "muon": 1}.get(
            self.name, 1 if self.momentum else 0
        )

    def states_of(self, is_matrix: bool) -> int:
        """The same of a parameter that is a matrix, or is none."""
        return 2 if self.name == "muon" and not is_matrix else self.states

    def group_of(self, name: str) -> int | None:
        """Number of a parameter's group, None where it is in none. Raises ConfigurationError for a
        pattern that is no regular expression.
        """
        return next(
            (index for index, each in enumerate(self.groups) if matches(each.match, name, GROUPS)),
            None,
        )


@dataclass(frozen=True, slots=True)
class Constraint:
    """A decision about the nodes whose name matches: obeyed, or refused with the reason. What is
    None is left open.
    """

    match: str
    """A glob over names of nodes, or a regular expression after `re:`."""
    stage: Index | None = None
    """The stage the nodes are in."""
    devices: tuple[Index, ...] | None = None
    """The devices the nodes run on; () for all."""
    split: tuple[tuple[str, Size], ...] | None = None
    """Degrees by axis of the iteration space, outer to inner over the stage's devices, such as `{b:
    2, n: 4}`; devices that the degrees leave over compute the same. `{}` splits nothing.
    """
    pipeline: Index = 0
    """Which of several pipelines this is for. Each holds the whole model in stages of its own,
    numbered from 0, and they take micro-batches in turn.
    """
    nodes: tuple[str, ...] | None = None
    """Where given, it is for the nodes of these names and no others, and `match` says where it
    comes from.
    """
    micro_batch_size: Size | None = None
    """Samples of a micro-batch of the nodes' stage, a divisor of those of the step's micro-batches.
    Strategy `manual` follows it.
    """


@dataclass(frozen=True, slots=True)
class LossDivision:
    """How the losses of the micro-batches of a step make the loss of the step."""

    weight: Annotated[Annotated[float, Above(0)] | None, OmitDefault()] = None
    """Factor of the loss of each micro-batch in the loss of the step; None for 1 / the number of
    micro-batches.
    """
    exact: Annotated[bool, OmitDefault()] = True
    """False if the loss of the step is not that of its whole batch: statistics, or losses, are per
    micro-batch.
    """
    divisible: Annotated[bool, OmitDefault()] = True
    """False if the loss of a batch does not follow from those of its parts. A validation then takes
    whole batches only.
    """
    divided: Annotated[str, OmitDefault()] = ""
    """The model's loss if micro-batches give totals that the loss of the step is computed from: a
    dividend as the loss of the program, and as counted labels a divisor, if there is one. "" if the
    program has the loss of the model.
    """
    added: Annotated[float, OmitDefault()] = 0.0
    """Number that is added to the divisor of a step."""
    minimum: Annotated[float | None, OmitDefault()] = None
    """Least divisor of a step."""
    root: Annotated[bool, OmitDefault()] = False
    """True if the loss of a step is the square root of what follows from its micro-batches."""

    def divisor(self, total: float) -> float:
        """Return the divisor of a step whose micro-batches have divisors of this weighted sum."""
        return max(total + self.added, -math.inf if self.minimum is None else self.minimum)

    def loss(self, total: float) -> float:
        """Return the loss of a step, given the weighted sum of the losses of its micro-batches."""
        if not self.root:
            return total
        return math.sqrt(total) if total >= 0 else math.nan


AVERAGED = LossDivision()
"""The loss of the step is the average of those of its micro-batches."""


def wanted_outputs(graph: Graph, mode: Mode, loss: str | None) -> tuple[str, ...]:
    """The values that a step computes: the loss where it trains, else the graph's outputs."""
    if mode is not Mode.TRAIN or not loss:
        return graph.outputs
    return (loss, COUNTED_LABELS) if graph.has(COUNTED_LABELS) else (loss,)


@dataclass(frozen=True, slots=True)
class Problem:
    """A costed graph of one micro-batch on one cluster, and the limits that an answer must keep.
    `graph` is one evaluation: `batch_size / micro_batches` samples, of which stages may take fewer
    at once. `work` has one entry a node. `memory_limit` is in bytes a device (the device's own
    memory where the user gives none).
    """

    graph: Graph
    work: tuple[Work, ...]
    cluster: Cluster
    batch_size: int
    micro_batches: int
    mode: Mode
    loss: str | None = None
    optimizer: Optimizer = Optimizer()
    lr_scheduler: LRScheduler = field(default=LRScheduler())
    training: Training = field(default=Training())
    precision: str = "fp32"
    compiled: bool = False
    """True if stages are compiled, so that neighbouring elementwise operators are one kernel."""
    recompute: str = "none"
    """`none`, `full` (every stage runs its forward again for backward) or `auto` (where memory asks
    for it).
    """
    memory_limit: int | None = None
    constraints: tuple[Constraint, ...] = ()
    time_limit: float | None = None
    solver: str = "auto"
    """The solver of integer programs: `auto`, or the name of a solver that PuLP runs."""
    seed: int = 0
    micro_batch_sizes: tuple[int, ...] = ()
    """Sizes that a strategy may choose its stages' micro-batches from: divisors of the graph's
    samples, ascending. () where the size is given; stages then have the graph's.
    """
    costs: Costs | None = None
    loss_division: LossDivision = AVERAGED
    known_s: float = math.inf
    """Seconds of a step that is known already: a strategy may raise InfeasibleError where it has
    nothing shorter.
    """

    @property
    def micro_batch_size(self) -> int:
        """Samples of one evaluation of the graph: the largest micro-batch that a stage may have."""
        return self.batch_size // self.micro_batches

    @property
    def train(self) -> bool:
        return self.mode is Mode.TRAIN

    def states_of(self, is_matrix: bool) -> int:
        """fp32 numbers kept for each number of a parameter that is a matrix, or is none, beside it
        and its gradient.
        """
        return self.optimizer.states_of(is_matrix) + (self.training.ema_decay is not None)

    @property
    def step_flops(self) -> float:
        """FLOPs of the model in a step: each node's forward and, in training, backward without
        recomputation.
        """
        per_micro_batch = sum(each.forward_flops for each in self.work)
        if self.train:
            per_micro_batch += sum(
                each.backward_flops - each.recomputed_flops for each in self.work
            )
        return per_micro_batch * self.micro_batches

    @property
    def peak_flops(self) -> float:
        """FLOP/s that all devices of the cluster together reach at most, in the number format of
        products.
        """
        return sum(device.peak(self.precision) for device in self.cluster.devices)

    @property
    def recomputes_all(self) -> bool:
        """True if every stage runs its forward again for its backward."""
        return self.train and self.recompute == "full"

    @property
    def wanted(self) -> tuple[str, ...]:
        """The values that a step computes: the loss where it trains, else the graph's outputs."""
        return wanted_outputs(self.graph, self.mode, self.loss)

    def memory_of(self, device: int) -> int:
        """Bytes that tensors may take on a device. On a GPU the context and NCCL's buffers need
        room beside them.
        """
        if self.memory_limit is not None:
            return self.memory_limit
        own = self.cluster.devices[device]
        return own.memory_bytes - (
            own.context_bytes and own.context_bytes + nccl_bytes(self.cluster.size)
        )
