"""Schema of the configuration, from which YAML keys, flags, `--set` and the reference are all made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from autopipe.configs.choice import Choice
from autopipe.configs.cluster_file import ClusterDescription
from autopipe.configs.device_file import DeviceCount
from autopipe.configs.quantity import BYTES, SECONDS
from autopipe.configs.schema import Above, AtLeast, AtMost, FilePath
from autopipe.ir import problem

Count = Annotated[int, AtLeast(1), AtMost(2**40)]
Rate = Annotated[float, AtLeast(0)]


@dataclass(frozen=True, slots=True)
class Model:
    """The model and what its file leaves open."""

    path: Annotated[str, FilePath()] | None = None
    """The ONNX file, where the command line does not name it."""

    dims: tuple[tuple[str, Count], ...] = ()
    """Extents of symbolic dimensions by name, such as `{seq: 128}`."""

    batch_axes: tuple[tuple[str, Annotated[int, AtLeast(0)] | None], ...] = ()
    """The batch axis by name of the input; `null` for an input without one. Axis 0 where an input is not listed."""

    frozen: tuple[str, ...] = ()
    """Parameters that are not trained: globs over their names, or regular expressions after `re:`."""

    trainable: tuple[str, ...] = ()
    """Tensors that are trained whatever the file says, and though `frozen` matches them too: patterns as there."""


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """The outputs and inputs that a cross-entropy is made of."""

    logits: str
    """The output with the scores, classes on its last axis."""

    labels: str
    """The input, added to the graph, with the class of each row."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss that the graph does not hold itself."""

    cross_entropy: CrossEntropy
    """Mean cross-entropy of logits against labels."""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """How parameters are updated, as torch's SGD and AdamW do it."""

    name: Literal["sgd", "adamw"] = "sgd"
    """The algorithm."""

    lr: Rate = 0.01
    """Learning rate."""

    momentum: Rate = 0.0
    """Momentum of `sgd`."""

    weight_decay: Rate = 0.0
    """Weight decay: added to the gradient by `sgd`, decoupled from it by `adamw`."""

    betas: tuple[Rate, Rate] = (0.9, 0.999)
    """Decay rates of `adamw`'s averages, below 1."""

    eps: Annotated[float, Above(0)] = 1e-8
    """Term added to `adamw`'s denominator."""

    shard: bool | None = None
    """Share out what the optimizer keeps among the devices that hold the same parameters, and the update with it
    (ZeRO-1); `null` leaves it to strategy `auto`, and is `false` under any other."""

    def for_problem(self) -> problem.Optimizer:
        """The same as the passes know it, with `shard` where it is left open off."""
        return problem.Optimizer(
            self.name, self.lr, self.momentum, self.weight_decay, self.betas, self.eps, bool(self.shard)
        )


@dataclass(frozen=True, slots=True)
class ClusterChoice:
    """The cluster to plan for: a preset, a file or a description, one of them."""

    selectors: ClassVar[tuple[str, ...]] = ("preset", "file", "inline")
    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = (("preset", "file", "inline"),)

    preset: str | None = None
    """One of the presets that `autopipe config clusters` lists; `a100-80gb` where no cluster is chosen."""

    file: Annotated[str, FilePath()] | None = None
    """A YAML file with the description of a cluster."""

    inline: ClusterDescription | None = None
    """The description itself."""

    nodes: DeviceCount | None = None
    """Number of nodes; as many as `gpus` needs where a preset leaves it open."""

    devices_per_node: DeviceCount | None = None
    """Number of devices in each node, in place of the cluster's own."""

    straddle: bool = False
    """True if a stage may have devices of different kinds. Otherwise none does but where constraints ask for it."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """A decision about the nodes whose name matches: obeyed, or refused with the reason."""

    match: str
    """A glob over names of nodes, or a regular expression after `re:`."""

    stage: Annotated[int, AtLeast(0)] | None = None
    """The stage the nodes are in."""

    devices: Literal["all"] | tuple[Annotated[int, AtLeast(0)], ...] | None = None
    """The devices the nodes run on."""

    split: tuple[tuple[str, Count], ...] | None = None
    """Degrees by axis of the iteration space, outer to inner over the stage's devices, such as `{b: 2, n: 4}`; devices
    that the degrees leave over compute the same. `{}` splits nothing."""

    pipeline: Annotated[int, AtLeast(0)] = 0
    """Which of several pipelines this is for. Each holds the whole model in stages of its own, numbered from 0, and
    they take micro-batches in turn."""

    micro_batch_size: Count | None = None
    """Samples of a micro-batch of the nodes' stage, a divisor of those of the step's micro-batches. Strategy `manual`
    follows it."""

    def for_problem(self) -> problem.Constraint:
        """The same as the passes know it, where no devices stand for all of them."""
        devices = () if self.devices == "all" else self.devices
        return problem.Constraint(
            self.match, self.stage, devices, self.split, self.pipeline, micro_batch_size=self.micro_batch_size
        )


@dataclass(frozen=True, slots=True)
class Configuration:
    """Everything a plan is made from besides the model's file."""

    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = (("micro_batches", "micro_batch_size"),)

    model: Model = field(default=Model())
    """The model and what its file leaves open."""

    mode: Literal["train", "infer"] | None = field(default=None, metadata={"flag": "--mode"})
    """Train or infer; `train` where the graph or `loss` gives a loss, else `infer`."""

    batch_size: Count | None = field(default=None, metadata={"flag": "--batch-size"})
    """Samples of one step; the batch of one evaluation of the graph times `micro_batches` where it is not given."""

    micro_batches: Count | Literal["auto"] = field(default="auto", metadata={"flag": "--micro-batches"})
    """Evaluations of the graph in one step; `auto` lets autopipe choose."""

    micro_batch_size: Count | None = field(default=None, metadata={"flag": "--micro-batch-size"})
    """Samples of one evaluation of the graph, in place of `micro_batches`."""

    loss: str | Loss | None = None
    """Name of the scalar output to minimise, or a loss to add to the graph."""

    optimizer: Optimizer = field(default=Optimizer())
    """How parameters are updated."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of the computation; parameters and their updates stay in fp32."""

    recompute: Literal["none", "full", "auto"] | None = None
    """Run each stage's forward again for its backward: never, always, or where memory asks for it; `null` leaves it to
    strategy `auto`, and is `none` under any other."""

    cluster: ClusterChoice = field(default=ClusterChoice(preset="a100-80gb"), metadata={"flag": "--cluster"})
    """The cluster to plan for."""

    gpus: DeviceCount | None = field(default=None, metadata={"flag": "--gpus"})
    """Number of devices; all of the cluster's (one node's where its nodes are open) where it is not given."""

    costs: Literal["roofline", "pase-paper"] | Annotated[str, FilePath()] = field(
        default="roofline", metadata={"flag": "--costs"}
    )
    """Source of costs: `roofline`, operations and bytes against the cluster's figures, or a file that `autopipe
    profile` wrote.
    """

    strategy: Choice = field(default=Choice("auto"), metadata={"flag": "--strategy"})
    """The strategy that makes the placement, with its options; `auto` takes the one with the shortest step."""

    schedule: Choice = field(default=Choice("auto"), metadata={"flag": "--schedule"})
    """The scheduler that orders the tasks, with its options; `auto` takes the one with the shortest step under strategy
    `auto`, and is `tessel` under any other."""

    constraints: tuple[Constraint, ...] = ()
    """Decisions that are already made."""

    memory_limit: Annotated[int, BYTES, AtLeast(1)] | None = field(default=None, metadata={"flag": "--memory-limit"})
    """Memory of each device that may be used; all of it where it is not given."""

    time_limit: Annotated[float, SECONDS, Above(0)] | None = field(default=None, metadata={"flag": "--time-limit"})
    """Time that each search may take."""

    seed: Annotated[int, AtLeast(0)] = 0
    """Seed of searches, and of random weights, data and masks."""
