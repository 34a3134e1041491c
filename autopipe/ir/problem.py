"""The input of strategies and schedulers: the model, its costs, the cluster and the settings, but
no planning decision.
"""

from __future__ import annotations

import enum
import fnmatch
import math
import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from autopipe.ir.cluster import Cluster, max_nccl_buffer_bytes
from autopipe.ir.codec import Above, Amount, AtLeast, AtMost, Index, OmitDefault
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import COUNTED_LABELS, Graph
from autopipe.ir.measured_costs import Costs
from autopipe.ir.model_parts import LayerSelection
from autopipe.ir.training import LRScheduler, Training


def matches_pattern(pattern: str, name: str, key: str) -> bool:
    """Return True if `pattern` matches the full `name`. A pattern is a glob or, after `re:`, a
    regular expression. Raise ConfigurationError if the regular expression is invalid; `key` is the
    configuration key of the pattern, for the message.
    """
    if pattern.startswith("re:"):
        try:
            return re.fullmatch(pattern[3:], name) is not None
        except re.error as error:
            raise ConfigurationError(
                f"{key}: {pattern!r} is not a valid regular expression: {error}"
            ) from error
    return fnmatch.fnmatchcase(name, pattern)


Size = Annotated[int, AtLeast(1), AtMost(2**40)]
Extent = Annotated[int, AtLeast(0), AtMost(2**40)]
"""Size of a dimension. It may be 0, for example for a decoder's cache before the first token."""


class Mode(enum.Enum):
    """Kind of step: training (forward, backward, update) or inference (forward only)."""

    TRAIN = "train"
    INFER = "infer"


Scores = Literal["keep", "recompute"]
"""Handling of the logits (scores) of a cross-entropy: they are saved for backward, or backward
recomputes them, which saves memory.
"""
SCORES: tuple[Scores, Scores] = ("keep", "recompute")


@dataclass(frozen=True, slots=True)
class MeasuredNodeTime:
    """Time of a node on one device type, from measured costs."""

    device: str
    """Name of the device type."""
    known: bool
    """True if the node itself was measured. Otherwise, its time is its roofline time multiplied by
    `scale`.
    """
    points: tuple[tuple[float, float, float], ...] = ()
    """Measured times: triples (fraction of the node that one device computes, seconds of forward,
    seconds of backward), in ascending order of the fraction. () if the roofline time is used.
    """
    scale: tuple[float, float] = (1.0, 1.0)
    """Pair (forward, backward) of factors of the roofline time."""


BACKWARD_OPERATORS = 2
"""Number of operators that the host launches in backward for each operator of forward. Layers of
generated programs for BERT and GPT dispatch 2.0 to 2.1 times as many ATen operators in backward as
in forward, in fp32 and in bf16.
"""


@dataclass(frozen=True, slots=True)
class NodeCost:
    """Cost of a node for one micro-batch, for all devices together.

    If the node is sharded into n equal shards, each shard has 1/n of the cost.
    """

    kind: str
    """`Operator.kind` of the node's operator."""
    forward_flops: float
    backward_flops: float
    forward_bytes: float
    """Bytes that forward reads and writes in memory, including parameters."""
    backward_bytes: float
    """Bytes that backward reads and writes in memory, including parameters."""
    kept_bytes: int
    """Bytes that are saved for backward. A value that several nodes save counts for the first of
    them.
    """
    measured: tuple[MeasuredNodeTime, ...] = ()
    """Times on each device type if the plan uses measured costs, otherwise ()."""
    launches: float = 1.0
    """Number of kernels that a forward launches. If one kernel computes several nodes, each of them
    has a fraction of it.
    """
    operators: float = 1.0
    """Number of operators, including views, that the host dispatches in a forward."""
    backward_operators: float = 0.0
    """Number of operators, including views, that the host dispatches in a backward."""
    product_rate: float = 1.0
    """Fraction of the device's FLOP/s for matmuls that the shapes of the operator permit."""
    recomputed_flops: float = 0.0
    """FLOPs of backward that compute values of forward again, such as the scores of an attention.
    """


FIRST_LOSS_SCALE = 2.0**16
PARAMETER_GROUPS_KEY = "optimizer.groups"
"""Configuration key of parameter groups, for messages."""


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Settings of the parameters whose names match. If several groups match, the first one is
    used.
    """

    match: str
    """A glob over names of parameters, or a regular expression after `re:`."""
    weight_decay: Annotated[Amount | None, OmitDefault()] = None
    """Weight decay of these parameters. Default: that of the optimizer."""
    lr_factor: Annotated[Amount, OmitDefault()] = 1.0
    """Factor of the learning rate."""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """Settings of the optimizer."""

    name: Literal["adamw", "adam", "sgd", "lion", "muon"] = "sgd"
    """The algorithm. `muon` updates unsharded matrices except embedding tables; all other
    parameters are updated by AdamW with the same learning rate.
    """
    lr: Amount = 0.01
    """Learning rate."""
    momentum: Amount = 0.0
    """Momentum of `sgd` and `muon`."""
    nesterov: Annotated[bool, OmitDefault()] = False
    """Nesterov momentum, for `sgd` and `muon`."""
    weight_decay: Amount = 0.0
    """Weight decay. `sgd` and `adam` add it to the gradient; in the other algorithms it is
    decoupled.
    """
    betas: tuple[Amount, Amount] = (0.9, 0.999)
    """Decay rates of the moving averages, each below 1."""
    eps: Annotated[float, Above(0)] = 1e-8
    """Term added to the denominator of `adamw`, `adam`."""
    shard: bool = False
    """True if the devices that hold the same shard of a parameter divide its optimizer state and
    its update among them (ZeRO-1: Rajbhandari et al., "ZeRO: Memory optimizations toward training
    trillion parameter models", SC 2020, section 5.1). If false, each of them has the full state.
    """
    groups: Annotated[tuple[ParameterGroup, ...], OmitDefault()] = ()
    """Parameters with a different weight decay or learning rate, such as `{match: '*.bias',
    weight_decay: 0}`.
    """
    loss_scale: Annotated[float, Above(0), OmitDefault()] = FIRST_LOSS_SCALE
    """Initial factor of the loss under precision `fp16`, so that small gradients do not become
    zero. If a gradient overflows, the step is skipped and the factor halved. After 2,000 steps
    without an overflow the factor is doubled.
    """

    @property
    def states(self) -> int:
        """Number of fp32 optimizer states per element of a parameter (for `muon`, of a matrix)."""
        return {"adamw": 2, "adam": 2, "lion": 1, "muon": 1}.get(
            self.name, 1 if self.momentum else 0
        )

    def states_of(self, is_matrix: bool) -> int:
        """Return the number of fp32 optimizer states per element of a matrix (`is_matrix`) or of
        another parameter.
        """
        return 2 if self.name == "muon" and not is_matrix else self.states

    def group_of(self, name: str) -> int | None:
        """Return the index of the first group that matches the parameter called `name`, or None if
        none matches. Raise ConfigurationError for an invalid regular expression.
        """
        return next(
            (
                index
                for index, each in enumerate(self.groups)
                if matches_pattern(each.match, name, PARAMETER_GROUPS_KEY)
            ),
            None,
        )


@dataclass(frozen=True, slots=True)
class Constraint:
    """A planning decision for the nodes whose names match, or for the nodes of layers. A plan that
    violates the decision is rejected. Fields that are None decide nothing.
    """

    match: Annotated[str, OmitDefault()] = ""
    """A glob over names of nodes, or a regular expression after `re:`. Either `match` or `layers`
    is required.
    """
    stage: Index | None = None
    """Stage of the nodes."""
    devices: tuple[Index, ...] | None = None
    """Devices of the nodes' stage; () for all devices."""
    split: tuple[tuple[str, Size], ...] | None = None
    """Split degree per axis of the iteration space, such as `{b: 2, n: 4}`, from the outermost to
    the innermost over the stage's devices. If the product is smaller than the number of devices,
    the remaining factor is replication. `{}` replicates the nodes.
    """
    pipeline: Index = 0
    """Index of the pipeline for which the constraint holds. If there are several pipelines, each
    has all nodes of the model in separate stages, and micro-batches alternate between the
    pipelines.
    """
    nodes: tuple[str, ...] | None = None
    """Names of the nodes for which the constraint holds. If set, `match` is not matched; it only
    describes the origin of the constraint in errors.
    """
    micro_batch_size: Size | None = None
    """Micro-batch size of the nodes' stage, a divisor of the micro-batch size of the step. Strategy
    `manual` supports it.
    """
    layers: Annotated[LayerSelection | None, OmitDefault()] = None
    """Repeated layers for whose nodes the constraint holds: `[0, 7]` for layers 0 to 7, or texts
    such as `encoder[0:4]` for layers 0 to 3 of the encoder.
    """


@dataclass(frozen=True, slots=True)
class LossDivision:
    """Formula by which the loss of a step is computed from the losses of its micro-batches."""

    weight: Annotated[Annotated[float, Above(0)] | None, OmitDefault()] = None
    """Factor of the loss of each micro-batch in the loss of the step; None for 1 / the number of
    micro-batches.
    """
    exact: Annotated[bool, OmitDefault()] = True
    """False if the loss of the step can differ from the loss of the full batch, because statistics
    or losses are computed for each micro-batch.
    """
    divisible: Annotated[bool, OmitDefault()] = True
    """False if the loss of a batch cannot be computed from the losses of its parts. Validation then
    uses full batches only.
    """
    divided: Annotated[str, OmitDefault()] = ""
    """Name of the model's loss, if the program computes the dividend of this loss instead of the
    loss. If the loss also has a divisor, the program computes this divisor as the number of counted
    labels. "" if the program computes the loss itself.
    """
    added: Annotated[float, OmitDefault()] = 0.0
    """Number that is added to the divisor of a step."""
    minimum: Annotated[float | None, OmitDefault()] = None
    """Minimum of the divisor of a step; None for no minimum."""
    root: Annotated[bool, OmitDefault()] = False
    """True if the loss of a step is the square root of the weighted sum over its micro-batches."""

    def divisor(self, total: float) -> float:
        """Return the divisor of a step. `total` is the weighted sum of the divisors of its
        micro-batches.
        """
        return max(total + self.added, -math.inf if self.minimum is None else self.minimum)

    def loss(self, total: float) -> float:
        """Return the loss of a step. `total` is the weighted sum of the losses of its
        micro-batches.
        """
        if not self.root:
            return total
        return math.sqrt(total) if total >= 0 else math.nan


AVERAGED_LOSS = LossDivision()
"""Formula for a loss of the step that is the average of the losses of its micro-batches."""


def wanted_outputs(graph: Graph, mode: Mode, loss: str | None) -> tuple[str, ...]:
    """Return the names of the values that a step computes. In training, they are the loss and, if
    the graph has it, the number of counted labels; in inference, the outputs of the graph.
    """
    if mode is not Mode.TRAIN or not loss:
        return graph.outputs
    return (loss, COUNTED_LABELS) if graph.has(COUNTED_LABELS) else (loss,)


@dataclass(frozen=True, slots=True)
class Problem:
    """A planning problem: the graph of one micro-batch, the costs of its nodes, a cluster, and
    settings.
    """

    graph: Graph
    """The forward pass of one micro-batch, with `batch_size / micro_batches` samples. A stage may
    have smaller micro-batches.
    """
    work: tuple[NodeCost, ...]
    """Cost of each node of the graph."""
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
    """True if torch compiles the stages, which fuses neighbouring elementwise operators to one
    kernel.
    """
    recompute: str = "none"
    """Which stages compute their forward again in backward: `none`, `full` (all stages) or `auto`
    (stages that otherwise exceed the memory).
    """
    memory_limit: int | None = None
    """Maximum bytes of tensors on each device; None for the memory of the device."""
    constraints: tuple[Constraint, ...] = ()
    time_limit: float | None = None
    solver: str = "auto"
    """Solver for integer programs: `auto`, or the name of a solver that PuLP can run."""
    seed: int = 0
    micro_batch_sizes: tuple[int, ...] = ()
    """Micro-batch sizes, ascending, between which a strategy may choose for each stage; they divide
    the micro-batch size of the graph. () if all stages have the micro-batch size of the graph.
    """
    costs: Costs | None = None
    loss_division: LossDivision = AVERAGED_LOSS
    known_s: float = math.inf
    """Seconds of the step of a known plan. A strategy may raise InfeasibleError if it finds no plan
    with a shorter step.
    """

    @property
    def micro_batch_size(self) -> int:
        """Number of samples of a micro-batch of the graph, the maximum micro-batch size of a
        stage.
        """
        return self.batch_size // self.micro_batches

    @property
    def train(self) -> bool:
        """True for training."""
        return self.mode is Mode.TRAIN

    def states_of(self, is_matrix: bool) -> int:
        """Return the number of fp32 values per element of a matrix (`is_matrix`) or of another
        parameter: the optimizer states, and the average of the weights if there is one.
        """
        return self.optimizer.states_of(is_matrix) + (self.training.ema_decay is not None)

    @property
    def step_flops(self) -> float:
        """FLOPs of a step: the forward of all nodes and, in training, their backward without the
        recomputation of forward values.
        """
        per_micro_batch = sum(each.forward_flops for each in self.work)
        if self.train:
            per_micro_batch += sum(
                each.backward_flops - each.recomputed_flops for each in self.work
            )
        return per_micro_batch * self.micro_batches

    @property
    def peak_flops(self) -> float:
        """Sum of the peak FLOP/s of all devices in the precision of the problem."""
        return sum(device.peak(self.precision) for device in self.cluster.devices)

    @property
    def recomputes_all(self) -> bool:
        """True if each stage recomputes its forward in backward."""
        return self.train and self.recompute == "full"

    @property
    def wanted(self) -> tuple[str, ...]:
        """Names of the values that a step computes; see `wanted_outputs`."""
        return wanted_outputs(self.graph, self.mode, self.loss)

    def memory_of(self, device: int) -> int:
        """Return the bytes that tensors may use on a device: the memory limit or, without a limit,
        the memory of the device minus that of the CUDA context and of NCCL's buffers.
        """
        if self.memory_limit is not None:
            return self.memory_limit
        own = self.cluster.devices[device]
        return own.memory_bytes - (
            own.context_bytes and own.context_bytes + max_nccl_buffer_bytes(self.cluster.size)
        )
