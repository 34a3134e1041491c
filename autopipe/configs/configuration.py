"""The configuration: its schema, from which YAML keys, flags, `--set` and the reference are all
made, and its loading.

Defaults are laid under a YAML file, that under the command line; then the rules that concern
several keys are checked.
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
    ExtraKeys,
    FilePath,
    FormerKey,
    Index,
    OmitDefault,
    Origin,
    Shape,
    encode,
    keys,
    unwrap,
)
from autopipe.ir.errors import ConfigurationError, quote
from autopipe.ir.problem import Extent, Size
from autopipe.ir.training import DataSettings, Evaluation, LRScheduler, Training


@dataclass(frozen=True, slots=True)
class Choice:
    """A name and its options, not checked yet."""

    selectors: ClassVar[tuple[str, ...]] = ("name",)
    name: str
    """Its name."""
    options: Annotated[tuple[tuple[str, Entry], ...], ExtraKeys(Entry.plain)] = field(default=())
    """The options of the one that is named, under their own names."""
    place: Annotated[Place, Origin("name")] = field(default=Place("the defaults"), compare=False)
    """Where the name was written."""


def build(choice: Choice, schema: type[Shape], path: str) -> Shape:
    """An instance of `schema`, the dataclass that `choice.name` stands for, with the options
    chosen. `path` is `strategy` or `schedule`. Raises ConfigurationError for an option that
    `schema` does not have, or of the wrong type.
    """
    return convert(Entry(dict(choice.options), Place(path)), schema, path)


@dataclass(frozen=True, slots=True)
class Model:
    """The model and what its file leaves open."""

    path: Annotated[str, FilePath()] | None = None
    """The ONNX file, where the command line does not name it."""
    dims: tuple[tuple[str, Extent], ...] = ()
    """Extents of symbolic dimensions by name, such as `{seq: 128}`."""
    batch_axes: tuple[tuple[str, Index | None], ...] = ()
    """The batch axis by name of the input; `null` for an input without one. Axis 0 where an input
    is not listed.
    """
    inputs: Annotated[tuple[tuple[str, bool | int | float], ...], OmitDefault()] = ()
    """Inputs that are always the same number, such as `{use_cache_branch: true}`: the model is read
    for that alone.
    """
    frozen: tuple[str, ...] = ()
    """Parameters that are not trained: globs or, after `re:`, regular expressions that match the
    whole name. `re:(?!head\\.).*` is every parameter whose name does not start with `head.`. One
    pattern needs no list.
    """
    trainable: tuple[str, ...] = ()
    """Tensors that are trained whatever the file says, and though `frozen` matches them too:
    patterns as there.
    """
    training: Annotated[bool | None, OmitDefault()] = None
    """`false` reads a graph that was exported for training as one for evaluation: nothing is
    dropped, and BatchNormalization reads its running statistics. `null` does so in mode `infer`
    alone.
    """


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """The outputs and inputs that a cross-entropy is made of."""

    logits: str
    """The output with the scores, classes on its last axis."""
    labels: str
    """The input, added to the graph, with the class of each row."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss, and what it is divided by."""

    scalar: ClassVar[str] = "output"
    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = (("cross_entropy", "output"),)
    cross_entropy: Annotated[CrossEntropy | None, OmitDefault()] = None
    """Mean cross-entropy of logits against labels, which is added to the graph."""
    output: Annotated[str | None, OmitDefault()] = None
    """Name of the scalar output to minimise."""
    normalize: Annotated[Literal["auto", "micro_batches", "sum", "tokens"], OmitDefault()] = "auto"
    """`auto` computes the loss of the whole batch from the losses of its micro-batches: their
    average for a mean over samples, their sum for a sum; other losses need a single micro-batch.
    `micro_batches` averages them and `sum` adds them up, whatever the loss is. `tokens` divides the
    sum over all labels of the step by the number of those that count, as Hugging Face does; of
    `cross_entropy`, the label -100 counts for nothing.
    """
    scores: Annotated[Literal["keep", "recompute", "auto"], OmitDefault()] = "auto"
    """`keep` saves the scores of a cross-entropy (logits) for backward. `recompute` computes them
    again there, a block of classes at a time: one more product, and less memory. `auto` keeps them
    if that fits memory and gives the shorter step; with fewer than 16,384 classes it always keeps
    them.
    """


@dataclass(frozen=True, slots=True)
class Optimizer(problem.Optimizer):
    """How parameters are updated, as torch's optimizers of these names do it."""

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
    """Learning rate; 0.001 where not given, 0.01 for `sgd`, 0.0001 for `lion`."""
    momentum: Amount | None = None  # type: ignore[assignment]
    """Momentum of `sgd` and `muon`; 0 and 0.95 where not given."""
    betas: tuple[Amount, Amount] | None = None  # type: ignore[assignment]
    """Decay rates of averages, below 1; 0.9 and 0.999 where not given, 0.9 and 0.99 for `lion`."""
    eps: Annotated[float, Above(0)] | None = None  # type: ignore[assignment]
    """Term added to the denominator of `adamw`, `adam`; 1e-08 where not given, 0.0001 for float16
    weights.
    """
    nesterov: Annotated[bool | None, OmitDefault()] = None  # type: ignore[assignment]
    """Nesterov's momentum, of `sgd` and `muon`; where not given `muon` has it."""
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
            for key in keys(problem.Optimizer)
            if key.name != "shard" and (value := getattr(self, key.name)) is not None
        }
        return problem.Optimizer(
            **{**_DEFAULTS[self.name], **settings, "shard": self.zero_stage == 1}
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


_ADAM: Mapping[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999)}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "adamw": _ADAM,
    "adam": _ADAM,
    "sgd": {"lr": 0.01, "momentum": 0.0},
    "lion": {"lr": 1e-4, "betas": (0.9, 0.99)},
    "muon": {**_ADAM, "momentum": 0.95, "nesterov": True},
}
"""Of each optimizer what torch, and of Lion the paper, has where nothing is given."""


@dataclass(frozen=True, slots=True)
class ClusterChoice:
    """The cluster to plan for: a preset, a file or a description, one of them."""

    selectors: ClassVar[tuple[str, ...]] = ("preset", "file", "inline")
    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = (("preset", "file", "inline"),)
    preset: str | None = None
    """One of the presets that `autopipe config clusters` lists; where no cluster is chosen, that of
    the GPUs here, or `cpu-local`.
    """
    file: Annotated[str, FilePath()] | None = None
    """A YAML file with the description of a cluster."""
    inline: ClusterDescription | None = None
    """The description itself."""
    nodes: DeviceCount | None = None
    """Number of nodes; as many as `gpus` needs where a preset leaves it open."""
    devices_per_node: DeviceCount | None = None
    """Number of devices in each node, in place of the cluster's own."""
    allow_mixed_stages: Annotated[bool, FormerKey("straddle")] = False
    """`true` allows stages whose devices are of different types. With `false` such a stage exists
    only if a constraint requires it.
    """
    internode_bandwidth_factor: Annotated[float, Above(0), OmitDefault()] = 1.0
    """Factor of the bandwidth of all links between nodes, whatever the cluster's description says;
    0.5 asks for a plan with half the network.
    """

    @property
    def is_open(self) -> bool:
        """True if none is named: the devices of this machine are meant."""
        return self.preset is None and self.file is None and self.inline is None

    def settled(self) -> ClusterChoice:
        """The same with the preset of this machine where none is named."""
        if not self.is_open:
            return self
        here = local_cluster()
        inside = cluster_preset(here.preset).levels[0].size
        # More GPUs than a node of the preset has are all in this one.
        own = here.count if inside is not None and here.count > inside else None
        return replace(self, preset=here.preset, devices_per_node=self.devices_per_node or own)


@dataclass(frozen=True, slots=True)
class Constraint(problem.Constraint):
    """A decision about the nodes whose name matches: obeyed, or refused with the reason."""

    written: ClassVar = ("match", "stage", "devices", "split", "pipeline", "micro_batch_size")

    devices: Literal["all"] | tuple[Index, ...] | None = None  # type: ignore[assignment]
    """The devices the nodes run on."""

    def for_problem(self) -> problem.Constraint:
        """The same as the passes know it, where no devices stand for all of them."""
        settings = {name: getattr(self, name) for name in self.written}
        return problem.Constraint(
            **{**settings, "devices": () if self.devices == "all" else self.devices}
        )


@dataclass(frozen=True, slots=True)
class Configuration:
    """Everything a plan is made from besides the model's file."""

    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = (("micro_batches", "micro_batch_size"),)
    model: Model = field(default=Model())
    """The model and what its file leaves open."""
    mode: Literal["train", "infer"] | None = field(
        default=None, metadata={"flag": "--mode train|infer"}
    )
    """Train or infer; `train` where the graph or `loss` gives a loss, else `infer`."""
    batch_size: Size | None = field(default=None, metadata={"flag": "--batch-size B"})
    """Samples of one step; the batch of one evaluation of the graph times `micro_batches` where it
    is not given.
    """
    micro_batches: Size | Literal["auto"] = field(
        default="auto", metadata={"flag": "--micro-batches M"}
    )
    """Evaluations of the graph in one step; `auto` lets autopipe choose."""
    micro_batch_size: Size | None = field(default=None, metadata={"flag": "--micro-batch-size B"})
    """Samples of one evaluation of the graph, in place of `micro_batches`."""
    loss: str | Loss | None = None
    """Name of the scalar output to minimise, or a loss to add to the graph. By default the output
    called `loss`, or the only scalar output that parameters change.
    """
    optimizer: Optimizer = field(default=Optimizer())
    """How parameters are updated."""
    eval: Annotated[Evaluation, OmitDefault()] = field(default=Evaluation())
    """Validation on the way."""
    lr_scheduler: Annotated[LRScheduler, OmitDefault()] = field(default=LRScheduler())
    """The learning rate by step, as a factor of `optimizer.lr`."""
    training: Annotated[Training, OmitDefault()] = field(default=Training())
    """Clipping, accumulation of gradients, averaging of weights."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """Precision of products; parameters and their updates stay in fp32. `tf32` rounds operands to
    19 bits on GPUs that have units for it, and is fp32 elsewhere; `bf16` and `fp16` run the whole
    forward through torch's autocast.
    """
    compile: bool = False
    """Price stages as `autopipe launch --compile` runs them, by the roofline: neighbouring
    elementwise operators and reductions are one pass over memory and one launch.
    """
    recompute: Literal["none", "full", "auto"] | None = field(
        default=None, metadata={"flag": "--recompute none|full|auto"}
    )
    """Run each stage's forward again for its backward: never, always, or where memory asks for it;
    `null` leaves it to strategy `auto`, and is `none` under any other.
    """
    data: Annotated[DataSettings, OmitDefault()] = field(default=DataSettings())
    """Where `launch` has samples from, and in which order."""
    cluster: ClusterChoice = field(
        default=ClusterChoice(), metadata={"flag": "--cluster PRESET|FILE"}
    )
    """The cluster to plan for; the devices of this machine where none is named."""
    gpus: DeviceCount | None = field(default=None, metadata={"flag": "--gpus N"})
    """Number of devices; all of the cluster's (one node's where its nodes are open) where it is not
    given, of this machine all GPUs, or a device a core, at most 8.
    """
    costs: Literal["roofline", "pase-paper"] | Annotated[str, FilePath()] = field(
        default="roofline", metadata={"flag": "--costs roofline|FILE"}
    )
    """Source of costs: `roofline`, operations and bytes against the cluster's figures, or a file
    that `autopipe profile` wrote.
    """
    strategy: Choice = field(default=Choice("auto"), metadata={"flag": "--strategy NAME"})
    """The strategy that makes the placement, with its options; `auto` takes the one with the
    shortest step.
    """
    schedule: Choice = field(default=Choice("auto"), metadata={"flag": "--schedule NAME"})
    """The scheduler that orders the tasks, with its options; `auto` takes the one with the shortest
    step under strategy `auto`, and is `tessel` under any other.
    """
    constraints: tuple[Constraint, ...] = ()
    """Decisions that are already made."""
    memory_limit: Annotated[int, BYTES, AtLeast(1)] | None = field(
        default=None, metadata={"flag": "--memory-limit 14GiB"}
    )
    """Memory of each device that may be used; all of it where it is not given."""
    time_limit: Annotated[float, SECONDS, Above(0)] | None = field(
        default=None, metadata={"flag": "--time-limit SECONDS"}
    )
    """Time that each search may take."""
    solver: Annotated[
        Literal[
            "auto", "highs", "cbc", "scip", "gurobi", "cplex", "xpress", "mosek", "copt", "cuopt"
        ],
        OmitDefault(),
    ] = "auto"
    """The solver of integer programs, which strategy `tepdist` uses: `auto` is HiGHS inside scipy,
    any other name is run through PuLP if it is installed (`autopipe config solvers` lists the
    solvers of this machine).
    """
    seed: Index = 0
    """Seed of searches, and of random weights, data and masks."""


def check(configuration: Configuration, document: Entry) -> None:
    """Raise ConfigurationError, at the entry of `document` that is to blame, for the first rule
    that is broken.
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
            raise ConfigurationError(message, f"{near} does", _place(document, name))
    if configuration.compile and configuration.costs != "roofline":
        message = (
            "compile: true prices stages by the roofline, and measured costs are of eager operators"
        )
        raise ConfigurationError(
            message, "leave out costs, or compile", _place(document, "compile")
        )
    for key in ("interval", "patience"):
        if getattr(configuration.eval, key) is not None and configuration.eval.data is None:
            message = f"eval.{key} is set, and there is no data to validate on"
            raise ConfigurationError(message, "give eval.data", _place(document, "eval", key))
    _check_optimizer(optimizer, document)
    for key in ("frozen", "trainable"):
        for index, pattern in enumerate(getattr(configuration.model, key)):
            _check_pattern(pattern, f"model.{key}[{index}]", _place(document, "model", key))
    for index, constraint in enumerate(configuration.constraints):
        _check_constraint(
            constraint,
            configuration.gpus,
            f"constraints[{index}]",
            _place(document, "constraints", index),
        )
    if choice.preset is not None:
        cluster_preset(choice.preset, where=_place(document, "cluster", "preset"))


_LACKS = {
    "adamw": ("momentum", "nesterov"),
    "adam": ("momentum", "nesterov"),
    "sgd": ("betas", "eps"),
    "lion": ("momentum", "nesterov", "eps"),
    "muon": (),
}
"""Keys that an optimizer has no use for."""


def _check_optimizer(optimizer: Optimizer, document: Entry) -> None:
    for name in _LACKS[optimizer.name]:
        if getattr(optimizer, name) not in (
            getattr(Optimizer(), name),
            getattr(problem.Optimizer(), name),
        ):
            message = f"optimizer {optimizer.name} has no {name}"
            raise ConfigurationError(message, "remove it", _place(document, "optimizer", name))
    if optimizer.betas is not None and max(optimizer.betas) >= 1:
        message = f"optimizer.betas are {list(optimizer.betas)}"
        where = _place(document, "optimizer", "betas")
        raise ConfigurationError(message, "each must be below 1", where)
    if optimizer.name == "sgd" and optimizer.nesterov and not optimizer.momentum:
        message = "optimizer.nesterov without momentum"
        where = _place(document, "optimizer", "nesterov")
        raise ConfigurationError(message, "give optimizer.momentum, such as 0.9", where)
    if optimizer.name == "muon" and optimizer.zero_stage == 1:
        message = "optimizer muon updates unsharded matrices, and optimizer.zero_stage is 1"
        where = _place(document, "optimizer", "zero_stage")
        raise ConfigurationError(message, "remove optimizer.zero_stage", where)
    for index, group in enumerate(optimizer.groups):
        where = _place(document, "optimizer", "groups", index)
        _check_pattern(group.match, f"optimizer.groups[{index}].match", where)


def _check_constraint(constraint: Constraint, gpus: int | None, path: str, where: str) -> None:
    _check_pattern(constraint.match, f"{path}.match", where)
    devices = constraint.devices
    if all(
        each is None
        for each in (constraint.stage, devices, constraint.split, constraint.micro_batch_size)
    ):
        hint = "give it stage, devices, split or micro_batch_size"
        raise ConfigurationError(f"{path} decides nothing", hint, where)
    if not isinstance(devices, tuple):
        return
    if not devices or len(set(devices)) < len(devices):
        hint = "name each device once, at least one"
        raise ConfigurationError(f"{path}.devices is {list(devices)}", hint, where)
    if gpus is not None and max(devices) >= gpus:
        message = f"{path} names device {max(devices)}, but there are {gpus}"
        raise ConfigurationError(message, f"devices are 0 to {gpus - 1}", where)


def _check_pattern(pattern: str, path: str, where: str) -> None:
    if pattern.startswith("re:"):
        try:
            re.compile(pattern.removeprefix("re:"))
        except (re.error, RecursionError, OverflowError) as error:
            message = f"{path}: {quote(pattern)} is no regular expression: {error}"
            raise ConfigurationError(message, where=where) from error


def _place(document: Entry, *path: str | int) -> str:
    """Where the entry at `path` was written, or the deepest one above it that was."""
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
"""A path of keys and what is set there."""


OPTION_FLAGS = {
    "--stages": (
        ("strategy", "stages"),
        "N",
        "Pipeline stages to make, where the strategy has an option stages (strategy.stages).",
    ),
    "--optimizer": (("optimizer", "name"), "NAME", "How parameters are updated (optimizer.name)."),
    "--lr": (("optimizer", "lr"), "RATE", "Learning rate (optimizer.lr)."),
}
"""Flags of keys inside others: the path of keys, the value's metavar, and what it does."""


def flags() -> dict[str, tuple[str, str]]:
    """The flags that set a key, in order of declaration: flag -> the key, and the value's
    metavar.
    """
    words = ((key.name, key.flag.split()) for key in keys(Configuration) if key.flag)
    return {flag: (name, metavar) for name, (flag, metavar) in words}


def settings(
    words: Mapping[str, str],
    dims: Sequence[str],
    assignments: Sequence[str],
    batch_axes: Sequence[str] = (),
) -> list[Setting]:
    """Settings of a command line, the later over the earlier. `words` are flags, of `OPTION_FLAGS`
    too, with their words, `dims` the words of `--dim NAME=SIZE`, `batch_axes` those of
    `--batch-axis INPUT=AXIS`, `assignments` those of `--set KEY=VALUE`. Raises ConfigurationError
    for a word without `=` or a key without a name.
    """
    found: list[Setting] = []
    for flag, word in words.items():
        path = OPTION_FLAGS[flag][0] if flag in OPTION_FLAGS else flags()[flag][:1]
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
            name, value = _assignment(text, flag, form)
            entry = read_word(value, f"{flag} {text}")
            if key == "batch_axes" and value == "null":
                entry = Entry(None, entry.place)
            found.append((("model", key, name), entry))
    for text in assignments:
        name, value = _assignment(text, "--set", "KEY=VALUE")
        found.append((tuple(name.split(".")), read_setting(value, f"--set {text}")))
    return found


def _assignment(text: str, flag: str, form: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name or not all(name.split(".")):
        raise ConfigurationError(f"{flag} {quote(text)} is not of the form {form}")
    return name, value


def _lay(base: Entry, over: Entry, hint: Any, path: str = "") -> Entry:
    """Return `base` with the keys of `over` replaced. `hint` is the type of the value, None if it
    is not known; `path` is the dotted key of the value.
    """
    kinds = typing.get_args(unwrap(hint)[0]) or (unwrap(hint)[0],)
    schema: Any = next(filter(dataclasses.is_dataclass, kinds), None)
    if schema is not None:
        base = with_present_keys(base, schema, path)
        over = with_present_keys(over, schema, path)
    scalar = getattr(schema, "scalar", None)
    if scalar is not None and isinstance(base.value, str) and isinstance(over.value, dict):
        base = Entry({scalar: base}, base.place)  # The scalar is short for a mapping with this key.
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
    hints = {key.name: key.hint for key in keys(schema)} if schema else {}
    for name, entry in over.value.items():
        inner = f"{path}.{name}" if path else name
        merged[name] = (
            _lay(merged[name], entry, hints.get(name), inner) if name in merged else entry
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
    """The defaults under a YAML file, under another one, `over`, under the command line, whose
    parts are as in `settings`. Raises ConfigurationError with `file:line` or the flag.
    """
    documents = [read_file(each) for each in (file, over) if each is not None]
    return effective(
        documents or [Entry({}, Place("the command line"))],
        settings(words or {}, dims, assignments, batch_axes),
    )


def effective(documents: Sequence[Entry], given: Sequence[Setting] = ()) -> Configuration:
    """The defaults with `documents`, at least one, laid over them in order, and the settings over
    all, checked. A mapping is merged key by key, with two exceptions that keep leftovers away:
    another strategy, scheduler or cluster comes without the options of the one it replaces, and of
    two keys that exclude each other the given one stays.
    """
    over = Entry({}, documents[0].place)
    for path, entry in given:
        for name in reversed(path):
            entry = Entry({name: entry}, entry.place)
        over = _lay(over, entry, None)
    merged = read_text(yaml.safe_dump(encode(Configuration())), "the defaults")
    for document in (*documents, over):
        merged = _lay(merged, document, Configuration)
    configuration = convert(merged, Configuration)
    check(configuration, merged)
    return configuration


def dump_configuration(configuration: Configuration) -> str:
    """The configuration as a YAML file that, loaded, gives the same configuration."""
    form = encode(configuration)
    text: str = yaml.dump(form, Dumper=Dumper, sort_keys=False, width=120, allow_unicode=False)
    return text


def resolve_cluster(configuration: Configuration) -> Cluster:
    """The devices and links that a configuration plans for. Raises ConfigurationError for a cluster
    that cannot be read, InfeasibleError where it has fewer than `gpus` devices.
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
