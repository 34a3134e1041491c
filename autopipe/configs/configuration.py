"""The configuration: its schema and its loading.

YAML keys, flags, `--set` and the reference page follow from the schema. A YAML file overrides the
defaults, and the command line overrides the file. Then `check` tests rules about several keys.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml

from autopipe.configs.cluster import (
    ClusterDescription,
    DeviceCount,
    build_cluster,
    cluster_preset,
    read_cluster,
    with_presets,
)
from autopipe.configs.local_devices import local_cluster
from autopipe.configs.schema import convert, with_present_keys
from autopipe.configs.yaml_source import (
    BYTES,
    SECONDS,
    Dumper,
    Entry,
    Place,
    read_file,
    read_setting,
    read_text,
    read_word,
)
from autopipe.ir import problem
from autopipe.ir.cluster import Cluster
from autopipe.ir.codec import (
    Above,
    Amount,
    AtLeast,
    DataclassType,
    ExtraKeys,
    FilePath,
    FormerKey,
    Index,
    OmitDefault,
    PositionOfKey,
    encode,
    schema_keys,
    split_annotated,
)
from autopipe.ir.errors import ConfigurationError, quote
from autopipe.ir.problem import Extent, Size
from autopipe.ir.training import DataSettings, Evaluation, LRScheduler, Training


@dataclass(frozen=True, slots=True)
class Choice:
    """Name and options of a strategy or scheduler; the options are not checked yet."""

    selectors: ClassVar[tuple[str, ...]] = ("name",)
    name: str
    """Name of the strategy or scheduler."""
    options: Annotated[tuple[tuple[str, Entry], ...], ExtraKeys(Entry.plain)] = field(default=())
    """Options of the named strategy or scheduler, as pairs (key, value)."""
    place: Annotated[Place, PositionOfKey("name")] = field(
        default=Place("the defaults"), compare=False
    )
    """File and line, or flag, of the name."""


def build(choice: Choice, schema: type[DataclassType], path: str) -> DataclassType:
    """Return an instance of `schema`, the class of strategy or scheduler `choice.name`, with the
    options of `choice`. `path` is `strategy` or `schedule`. Raise ConfigurationError for an unknown
    option or a wrong type.
    """
    return convert(Entry(dict(choice.options), Place(path)), schema, path)


@dataclass(frozen=True, slots=True)
class Model:
    """The model, and properties that its file does not define."""

    path: Annotated[str, FilePath()] | None = None
    """Path of the ONNX file. The command line overrides it."""
    dims: tuple[tuple[str, Extent], ...] = ()
    """Sizes of symbolic dimensions by name, such as `{seq: 128}`."""
    batch_axes: tuple[tuple[str, Index | None], ...] = ()
    """Batch axis per input; `null` for an input without a batch dimension. Default: axis 0."""
    inputs: Annotated[tuple[tuple[str, bool | int | float], ...], OmitDefault()] = ()
    """Inputs with a constant value, such as `{use_cache_branch: true}`. The model is read for these
    values only.
    """
    frozen: tuple[str, ...] = ()
    """Patterns of parameters that are not trained: globs or, after `re:`, regular expressions that
    match the full name. `re:(?!head\\.).*` matches each parameter whose name does not start with
    `head.`. One pattern needs no list.
    """
    trainable: tuple[str, ...] = ()
    """Patterns, as in `frozen`, of tensors that are always trained, even if `frozen` matches
    them.
    """
    training: Annotated[bool | None, OmitDefault()] = None
    """`false` reads a graph that was exported in training mode as in evaluation mode: without
    dropout, and BatchNormalization uses its running statistics. `null` does this in mode `infer`
    only.
    """


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """Logits and labels of a cross-entropy."""

    logits: str
    """Name of the output with the logits; the last axis is the class."""
    labels: str
    """Name of an input that is added to the graph: the class of each sample or token."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss and its normalization."""

    scalar: ClassVar[str] = "output"
    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = (("cross_entropy", "output"),)
    cross_entropy: Annotated[CrossEntropy | None, OmitDefault()] = None
    """Adds the mean cross-entropy of logits and labels to the graph."""
    output: Annotated[str | None, OmitDefault()] = None
    """Name of the scalar output to minimise."""
    normalize: Annotated[Literal["auto", "micro_batches", "sum", "tokens"], OmitDefault()] = "auto"
    """Computation of the loss of a step from the losses of its micro-batches. `auto` computes the
    loss of the full batch: the average for a mean over samples, the sum for a sum; other losses
    require a single micro-batch. `micro_batches` averages and `sum` adds any loss. `tokens` divides
    the sum over all labels of the step by the number of labels that are not ignored, as Hugging
    Face does; `cross_entropy` then ignores the label -100.
    """
    scores: Annotated[Literal["keep", "recompute", "auto"], OmitDefault()] = "auto"
    """`keep` saves the logits of a cross-entropy for backward. `recompute` recomputes the logits in
    backward for one block of classes at a time: one more matmul, and less memory. `auto` saves them
    if they fit memory and the step is shorter, and always with fewer than 16,384 classes.
    """


@dataclass(frozen=True, slots=True)
class Optimizer(problem.Optimizer):
    """Settings of the optimizer."""

    written: ClassVar = (
        "name",
        "lr",
        "momentum",
        "nesterov",
        "weight_decay",
        "betas",
        "eps",
        "zero_stage",
        "groups",
        "loss_scale",
    )
    name: Literal["adamw", "adam", "sgd", "lion", "muon"] = "adamw"
    lr: Amount | None = None  # type: ignore[assignment]
    """Learning rate. Default: 0.001; 0.01 for `sgd`; 0.0001 for `lion`."""
    momentum: Amount | None = None  # type: ignore[assignment]
    """Momentum. Default: 0 for `sgd`, 0.95 for `muon`."""
    betas: tuple[Amount, Amount] | None = None  # type: ignore[assignment]
    """Decay rates of moving averages, below 1. Default: 0.9, 0.999; for `lion` 0.9, 0.99."""
    eps: Annotated[float, Above(0)] | None = None  # type: ignore[assignment]
    """Term added to the denominator of `adamw` and `adam`. Default: 1e-08; 0.0001 for float16
    weights.
    """
    nesterov: Annotated[bool | None, OmitDefault()] = None  # type: ignore[assignment]
    """Nesterov momentum, for `sgd` and `muon`. Default: `true` for `muon`."""
    zero_stage: Annotated[Literal[0, 1] | None, FormerKey("shard", ((True, 1), (False, 0)))] = None
    """ZeRO stage. `1` shards the optimizer state and the update over the devices that hold the same
    parameters; `0` replicates both. `null` lets strategy `auto` choose; under any other strategy it
    means `0`.
    """

    def for_problem(self) -> problem.Optimizer:
        """Return the optimizer with the defaults of `name`, and with `shard` false if `zero_stage`
        is null.
        """
        settings = {
            key.name: value
            for key in schema_keys(problem.Optimizer)
            if key.name != "shard" and (value := getattr(self, key.name)) is not None
        }
        return problem.Optimizer(
            **{**_OPTIMIZER_DEFAULTS[self.name], **settings, "shard": self.zero_stage == 1}
        )

    def settled(self, chosen: problem.Optimizer) -> Optimizer:
        """Return these settings with each one that is null taken from `chosen`."""
        values: dict[str, object] = {
            "lr": chosen.lr,
            "momentum": chosen.momentum,
            "betas": chosen.betas,
            "eps": chosen.eps,
            "zero_stage": int(chosen.shard),
        }
        if self.name == "muon":
            values["nesterov"] = chosen.nesterov
        changes = {name: value for name, value in values.items() if getattr(self, name) is None}
        return replace(self, **changes)  # type: ignore[arg-type]


_ADAM_DEFAULTS: Mapping[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999)}
_OPTIMIZER_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "adamw": _ADAM_DEFAULTS,
    "adam": _ADAM_DEFAULTS,
    "sgd": {"lr": 0.01, "momentum": 0.0},
    "lion": {"lr": 1e-4, "betas": (0.9, 0.99)},
    "muon": {**_ADAM_DEFAULTS, "momentum": 0.95, "nesterov": True},
}
"""Defaults of each optimizer: those of torch, and for Lion those of the paper."""


@dataclass(frozen=True, slots=True)
class ClusterChoice:
    """The cluster: one of a preset, a file or an inline description."""

    selectors: ClassVar[tuple[str, ...]] = ("preset", "file", "inline")
    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = (("preset", "file", "inline"),)
    preset: str | None = None
    """A preset of `autopipe config clusters`. Default if no cluster is given: the preset of the
    local GPUs, or `cpu-local`.
    """
    file: Annotated[str, FilePath()] | None = None
    """Path of a YAML file that describes a cluster."""
    inline: ClusterDescription | None = None
    """Description of a cluster."""
    nodes: DeviceCount | None = None
    """Number of nodes. Default: that of the cluster, or the number that `gpus` requires."""
    devices_per_node: DeviceCount | None = None
    """Number of devices per node. Default: that of the cluster."""
    allow_mixed_stages: Annotated[bool, FormerKey("straddle")] = False
    """`true` allows stages whose devices are of different types. With `false` such a stage exists
    only if a constraint requires it.
    """
    internode_bandwidth_factor: Annotated[float, Above(0), OmitDefault()] = 1.0
    """Factor of the bandwidth of all links between nodes. 0.5 plans for half the bandwidth."""

    @property
    def is_open(self) -> bool:
        """True if no cluster is given, so that the devices of this machine are used."""
        return self.preset is None and self.file is None and self.inline is None

    def settled(self) -> ClusterChoice:
        """Return this choice with the preset of this machine if no cluster is given."""
        if not self.is_open:
            return self
        here = local_cluster()
        inside = cluster_preset(here.preset).levels[0].size
        # The local GPUs are in one node. If they exceed the node size of the preset, their number
        # replaces this size.
        own = here.count if inside is not None and here.count > inside else None
        return replace(self, preset=here.preset, devices_per_node=self.devices_per_node or own)


@dataclass(frozen=True, slots=True)
class Constraint(problem.Constraint):
    """A planning decision for the nodes whose names match, or for the nodes of layers."""

    written: ClassVar = (
        "match",
        "layers",
        "stage",
        "devices",
        "split",
        "pipeline",
        "micro_batch_size",
    )

    devices: Literal["all"] | tuple[Index, ...] | None = None  # type: ignore[assignment]
    """Devices of the nodes' stage, or `all`."""

    def for_problem(self) -> problem.Constraint:
        """Return the constraint for the planner, which represents `all` devices by ()."""
        settings = {name: getattr(self, name) for name in self.written}
        return problem.Constraint(
            **{**settings, "devices": () if self.devices == "all" else self.devices}
        )


@dataclass(frozen=True, slots=True)
class Configuration:
    """All inputs of a plan except the model file."""

    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = (("micro_batches", "micro_batch_size"),)
    model: Model = field(default=Model())
    """The model, and properties that its file does not define."""
    mode: Literal["train", "infer"] | None = field(
        default=None, metadata={"flag": "--mode train|infer"}
    )
    """Purpose of the plan. Default: `train` if the graph or the key `loss` has a loss, otherwise
    `infer`.
    """
    batch_size: Size | None = field(default=None, metadata={"flag": "--batch-size B"})
    """Global batch size: the number of samples per step. Default: the batch size of the ONNX file
    times `micro_batches`.
    """
    micro_batches: Size | Literal["auto"] = field(
        default="auto", metadata={"flag": "--micro-batches M"}
    )
    """Number of micro-batches per step. With `auto`, the strategy chooses it."""
    micro_batch_size: Size | None = field(default=None, metadata={"flag": "--micro-batch-size B"})
    """Number of samples per micro-batch. Excludes `micro_batches`."""
    loss: str | Loss | None = None
    """Name of the scalar output to minimise, or a loss to add to the graph. By default the output
    called `loss`, or the only scalar output that parameters change.
    """
    optimizer: Optimizer = field(default=Optimizer())
    """The optimizer and its settings."""
    eval: Annotated[Evaluation, OmitDefault()] = field(default=Evaluation())
    """Validation during training."""
    lr_scheduler: Annotated[LRScheduler, OmitDefault()] = field(default=LRScheduler())
    """Schedule of the learning rate: a factor of `optimizer.lr` for each step."""
    training: Annotated[Training, OmitDefault()] = field(default=Training())
    """Gradient clipping, gradient accumulation, and moving averages of weights."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """Precision of matmuls and convolutions. Parameters and their updates are always fp32. `tf32`
    rounds the operands to 19 bits on GPUs with TF32 units; other devices compute in fp32. `bf16`
    and `fp16` run the forward pass under torch's autocast.
    """
    compile: bool = False
    """Predict costs of stages for `autopipe launch --compile`: adjacent elementwise operators and
    reductions count as one kernel, which reads its inputs and writes its outputs once. Requires
    roofline costs.
    """
    recompute: Literal["none", "full", "auto"] | None = field(
        default=None, metadata={"flag": "--recompute none|full|auto"}
    )
    """Activation recomputation in backward: `none`; `full`, in all stages; `auto`, in the stages
    that would exceed their memory. With `null`, strategy `auto` chooses; any other strategy uses
    `none`.
    """
    data: Annotated[DataSettings, OmitDefault()] = field(default=DataSettings())
    """Source and order of the samples of `autopipe launch`."""
    cluster: ClusterChoice = field(
        default=ClusterChoice(), metadata={"flag": "--cluster PRESET|FILE"}
    )
    """The cluster to plan for. Default: the devices of this machine."""
    gpus: DeviceCount | None = field(default=None, metadata={"flag": "--gpus N"})
    """Number of devices. Default: all devices of the cluster, or one node if its number of nodes is
    not fixed; without a cluster, all local GPUs or one device per CPU core, at most 8.
    """
    costs: Literal["roofline", "pase-paper"] | Annotated[str, FilePath()] = field(
        default="roofline", metadata={"flag": "--costs roofline|FILE"}
    )
    """Source of costs: `roofline` (FLOPs and bytes divided by the rates of the cluster), or a file
    of `autopipe profile`.
    """
    strategy: Choice = field(default=Choice("auto"), metadata={"flag": "--strategy NAME"})
    """The placement strategy and its options. `auto` chooses the one with the shortest step."""
    schedule: Choice = field(default=Choice("auto"), metadata={"flag": "--schedule NAME"})
    """The scheduler and its options. `auto` chooses the one with the shortest step under strategy
    `auto`, and `tessel` under any other strategy.
    """
    constraints: tuple[Constraint, ...] = ()
    """Decisions that the strategy must follow for some nodes."""
    memory_limit: Annotated[int, BYTES, AtLeast(1)] | None = field(
        default=None, metadata={"flag": "--memory-limit 14GiB"}
    )
    """Maximum memory per device. Default: the memory of the device."""
    time_limit: Annotated[float, SECONDS, Above(0)] | None = field(
        default=None, metadata={"flag": "--time-limit SECONDS"}
    )
    """Maximum time per search. Default: no limit."""
    solver: Annotated[
        Literal[
            "auto", "highs", "cbc", "scip", "gurobi", "cplex", "xpress", "mosek", "copt", "cuopt"
        ],
        OmitDefault(),
    ] = "auto"
    """The solver of integer programs, for strategy `tepdist`. `auto` is HiGHS in SciPy. PuLP runs
    the other solvers; `autopipe config solvers` lists the installed ones.
    """
    seed: Index = 0
    """Seed of searches and of random weights, data and dropout masks."""


def check(configuration: Configuration, document: Entry) -> None:
    """Raise ConfigurationError, with file and line of the entry in `document`, for the first
    violated rule.
    """
    batch = configuration.batch_size
    optimizer = configuration.optimizer
    choice = configuration.cluster
    for name in ("micro_batches", "micro_batch_size"):
        part = getattr(configuration, name)
        if batch is not None and isinstance(part, int) and batch % part:
            divisors = [
                divisor for divisor in range(1, min(batch, 4096) + 1) if batch % divisor == 0
            ]
            near = min(divisors, key=lambda divisor: abs(divisor - part))
            message = f"{name} {part} does not divide batch_size {batch}"
            raise ConfigurationError(
                message,
                f"use a divisor of the batch size, such as {near}",
                _place_of_key(document, name),
            )
    if configuration.compile and configuration.costs != "roofline":
        message = (
            "compile: true requires roofline costs, because costs are measured for eager operators"
        )
        raise ConfigurationError(
            message, "remove costs or compile", _place_of_key(document, "compile")
        )
    for key in ("interval", "patience"):
        if getattr(configuration.eval, key) is not None and configuration.eval.data is None:
            message = f"eval.{key} is set, but eval.data is not"
            raise ConfigurationError(message, "set eval.data", _place_of_key(document, "eval", key))
    _check_optimizer(optimizer, document)
    for key in ("frozen", "trainable"):
        for index, pattern in enumerate(getattr(configuration.model, key)):
            _check_pattern(pattern, f"model.{key}[{index}]", _place_of_key(document, "model", key))
    for index, constraint in enumerate(configuration.constraints):
        _check_constraint(
            constraint,
            configuration.gpus,
            f"constraints[{index}]",
            _place_of_key(document, "constraints", index),
        )
    if choice.preset is not None:
        cluster_preset(choice.preset, where=_place_of_key(document, "cluster", "preset"))


_UNSUPPORTED_OPTIMIZER_KEYS = {
    "adamw": ("momentum", "nesterov"),
    "adam": ("momentum", "nesterov"),
    "sgd": ("betas", "eps"),
    "lion": ("momentum", "nesterov", "eps"),
    "muon": (),
}
"""Keys that an optimizer does not support, by the optimizer's name."""


def _check_optimizer(optimizer: Optimizer, document: Entry) -> None:
    for name in _UNSUPPORTED_OPTIMIZER_KEYS[optimizer.name]:
        if getattr(optimizer, name) not in (
            getattr(Optimizer(), name),
            getattr(problem.Optimizer(), name),
        ):
            message = f"optimizer {optimizer.name} does not support the option {name}"
            raise ConfigurationError(
                message, f"remove optimizer.{name}", _place_of_key(document, "optimizer", name)
            )
    if optimizer.betas is not None and max(optimizer.betas) >= 1:
        message = f"optimizer.betas are {list(optimizer.betas)}, expected numbers below 1"
        where = _place_of_key(document, "optimizer", "betas")
        raise ConfigurationError(message, "set each of optimizer.betas below 1", where)
    if optimizer.name == "sgd" and optimizer.nesterov and not optimizer.momentum:
        message = "optimizer.nesterov is true, but optimizer.momentum is 0"
        where = _place_of_key(document, "optimizer", "nesterov")
        raise ConfigurationError(message, "set optimizer.momentum, such as 0.9", where)
    if optimizer.name == "muon" and optimizer.zero_stage == 1:
        message = "optimizer muon requires unsharded matrices, but optimizer.zero_stage is 1"
        where = _place_of_key(document, "optimizer", "zero_stage")
        raise ConfigurationError(message, "remove optimizer.zero_stage", where)
    for index, group in enumerate(optimizer.groups):
        where = _place_of_key(document, "optimizer", "groups", index)
        _check_pattern(group.match, f"optimizer.groups[{index}].match", where)


def _check_constraint(constraint: Constraint, gpus: int | None, path: str, where: str) -> None:
    if bool(constraint.match) == (constraint.layers is not None):
        found = "both match and layers" if constraint.match else "neither match nor layers"
        raise ConfigurationError(
            f"{path} has {found}, expected one of them",
            "state the nodes with match: NAME, or with layers: [FIRST, LAST]",
            where,
        )
    _check_pattern(constraint.match, f"{path}.match", where)
    devices = constraint.devices
    if all(
        each is None
        for each in (constraint.stage, devices, constraint.split, constraint.micro_batch_size)
    ):
        hint = "add stage, devices, split or micro_batch_size to the constraint"
        raise ConfigurationError(f"{path} requires nothing of its nodes", hint, where)
    if not isinstance(devices, tuple):
        return
    if not devices or len(set(devices)) < len(devices):
        hint = "list one device or more, each device once"
        raise ConfigurationError(
            f"{path}.devices is {list(devices)}, expected one or more different devices",
            hint,
            where,
        )
    if gpus is not None and max(devices) >= gpus:
        message = f"{path} lists device {max(devices)}, but the number of devices is {gpus}"
        raise ConfigurationError(message, f"use devices 0 to {gpus - 1}", where)


def _check_pattern(pattern: str, path: str, where: str) -> None:
    if pattern.startswith("re:"):
        try:
            re.compile(pattern.removeprefix("re:"))
        except (re.error, RecursionError, OverflowError) as error:
            message = f"{path}: {quote(pattern)} is no regular expression: {error}"
            raise ConfigurationError(message, where=where) from error


def _place_of_key(document: Entry, *path: str | int) -> str:
    """Return file and line of the entry at `path`, or of its deepest parent that was written."""
    for step in path:
        inside = document.value
        inner = None
        if isinstance(inside, dict):
            inner = inside.get(str(step))
        elif isinstance(inside, tuple) and isinstance(step, int):
            inner = inside[step]
        if inner is None:
            break
        document = inner
    return str(document.place)


Setting = tuple[tuple[str, ...], Entry]
"""A path of keys and the value to set."""


OPTION_FLAGS = {
    "--stages": (
        ("strategy", "stages"),
        "N",
        "Number of pipeline stages, for strategies with this option (strategy.stages).",
    ),
    "--optimizer": (("optimizer", "name"), "NAME", "Name of the optimizer (optimizer.name)."),
    "--lr": (("optimizer", "lr"), "RATE", "Learning rate (optimizer.lr)."),
}
"""Flags of nested keys: path of keys, metavar of the value, and help text."""


def top_level_flags() -> dict[str, tuple[str, str]]:
    """Return {flag: (key, metavar)} for flags of top-level keys, in order of declaration."""
    words = ((key.name, key.flag.split()) for key in schema_keys(Configuration) if key.flag)
    return {flag: (name, metavar) for name, (flag, metavar) in words}


def settings_from_flags(
    words: Mapping[str, str],
    dims: Sequence[str],
    assignments: Sequence[str],
    batch_axes: Sequence[str] = (),
) -> list[Setting]:
    """Return the settings of a command line; later ones override earlier ones.

    `words` maps flags, including those of `OPTION_FLAGS`, to their values. `dims`, `batch_axes` and
    `assignments` are the values of `--dim NAME=SIZE`, `--batch-axis INPUT=AXIS` and `--set
    KEY=VALUE`. Raise ConfigurationError for a value without `=` or an empty key.
    """
    found: list[Setting] = []
    for flag, word in words.items():
        path = OPTION_FLAGS[flag][0] if flag in OPTION_FLAGS else top_level_flags()[flag][:1]
        if path == ("cluster",):
            path = ("cluster", "file" if "." in word or "/" in word else "preset")
        elif path in (("strategy",), ("schedule",)):
            path = (*path, "name")
        found.append((path, read_word(word, f"{flag} {word}")))
    for texts, flag, form, key in (
        (dims, "--dim", "NAME=SIZE", "dims"),
        (batch_axes, "--batch-axis", "INPUT=AXIS", "batch_axes"),
    ):
        for text in texts:
            name, value = _parse_assignment(text, flag, form)
            entry = read_word(value, f"{flag} {text}")
            if key == "batch_axes" and value == "null":
                entry = Entry(None, entry.place)
            found.append((("model", key, name), entry))
    for text in assignments:
        name, value = _parse_assignment(text, "--set", "KEY=VALUE")
        found.append((tuple(name.split(".")), read_setting(value, f"--set {text}")))
    return found


def _parse_assignment(text: str, flag: str, form: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name or not all(name.split(".")):
        raise ConfigurationError(f"{flag} is {quote(text)}, expected {form}")
    return name, value


def _merge_entries(base: Entry, over: Entry, hint: Any, path: str = "") -> Entry:
    """Return `base` with the keys of `over` replaced. `hint` is the type of the value, None if the
    type is unknown. `path` is the dotted key of the value.
    """
    kinds = typing.get_args(split_annotated(hint)[0]) or (split_annotated(hint)[0],)
    schema: Any = next(filter(dataclasses.is_dataclass, kinds), None)
    if schema is not None:
        base = with_present_keys(base, schema, path)
        over = with_present_keys(over, schema, path)
    scalar = getattr(schema, "scalar", None)
    if scalar is not None and isinstance(base.value, str) and isinstance(over.value, dict):
        # A mapping with a default key may be written as a scalar, which is the value of that key.
        # So the scalar becomes a mapping here.
        base = Entry({scalar: base}, base.place)
    if not isinstance(base.value, dict) or not isinstance(over.value, dict):
        return over
    chosen = {name for name in getattr(schema, "selectors", ()) if name in over.value}
    if any(over.value[name] != base.value.get(name) for name in chosen):
        return over
    merged = dict(base.value)
    for group in getattr(schema, "exclusive", ()):
        given = {
            name for name in group if name in over.value and over.value[name].value is not None
        }
        for name in set(group) - given if given else ():
            merged.pop(name, None)
    hints = {key.name: key.hint for key in schema_keys(schema)} if schema else {}
    for name, entry in over.value.items():
        inner = f"{path}.{name}" if path else name
        merged[name] = (
            _merge_entries(merged[name], entry, hints.get(name), inner) if name in merged else entry
        )
    return Entry(merged, base.place)


def load_configuration(
    file: str | Path | None = None,
    words: Mapping[str, str] | None = None,
    dims: Sequence[str] = (),
    assignments: Sequence[str] = (),
    over: str | Path | None = None,
    batch_axes: Sequence[str] = (),
) -> Configuration:
    """Return the configuration from the YAML files `file` and `over` and from a command line.
    `over` overrides `file`; the command line overrides both. The other parameters are those of
    `settings_from_flags`. Raise ConfigurationError with `file:line` or the flag.
    """
    documents = [read_file(each) for each in (file, over) if each is not None]
    return merged_configuration(
        documents or [Entry({}, Place("the command line"))],
        settings_from_flags(words or {}, dims, assignments, batch_axes),
    )


def merged_configuration(
    documents: Sequence[Entry], given: Sequence[Setting] = ()
) -> Configuration:
    """Return the checked configuration of the defaults, `documents` (at least one) and settings,
    each overriding the previous ones.

    Mappings are merged key by key, with two exceptions. A different strategy, scheduler or cluster
    does not inherit the options of the one it replaces. A key removes inherited keys that exclude
    it.
    """
    over = Entry({}, documents[0].place)
    for path, entry in given:
        for name in reversed(path):
            entry = Entry({name: entry}, entry.place)
        over = _merge_entries(over, entry, None)
    merged = read_text(yaml.safe_dump(encode(Configuration())), "the defaults")
    for document in (*documents, over):
        merged = _merge_entries(merged, document, Configuration)
    configuration = convert(merged, Configuration)
    check(configuration, merged)
    return configuration


def dump_configuration(configuration: Configuration) -> str:
    """Return the configuration as YAML text that loads as an equal configuration."""
    form = encode(configuration)
    text: str = yaml.dump(form, Dumper=Dumper, sort_keys=False, width=120, allow_unicode=False)
    return text


def resolve_cluster(configuration: Configuration) -> Cluster:
    """Return the cluster of a configuration. Raise ConfigurationError if it cannot be read,
    InfeasibleError if it has fewer than `gpus` devices.
    """
    given = configuration.cluster
    choice = given.settled()
    count = configuration.gpus
    if given.is_open and given.nodes is None and given.devices_per_node is None:
        count = count or local_cluster().count
    if choice.inline is not None:
        description = with_presets(choice.inline, "cluster.inline")
    else:
        description = (
            read_cluster(choice.file) if choice.file else cluster_preset(choice.preset or "")
        )
    found = build_cluster(description, count, choice.nodes, choice.devices_per_node)
    found = found.with_bandwidth(choice.internode_bandwidth_factor, inside_nodes=False)
    return replace(found, allow_mixed_stages=choice.allow_mixed_stages)
