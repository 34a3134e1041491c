"""Programs that the profiler runs: sequences of operators, synthetic stages, the full model on one
device, and the model on two ranks.

Times of single operators deviate from those in the model: in the model, an operator finds its
operands in the caches because the previous operator has just written them. A run of the full model
corrects for this. A run of the model's two-stage pipeline corrects the time that messages take from
a rank, because moving messages interrupts its tasks.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autopipe.backends.torch.codegen.program import ProgramFiles, Provenance, write_program
from autopipe.backends.torch.profiler.communication import (
    measure_exchanges,
    measure_period,
    measure_post_overhead,
    median_forward_interval,
)
from autopipe.backends.torch.profiler.operators import TaskStartOverhead
from autopipe.backends.torch.profiler.timed_program import measure_in_process
from autopipe.configs.cluster import build_cluster, cluster_preset
from autopipe.ir.errors import AutopipeError, ConfigurationError
from autopipe.ir.graph import DType, Graph, Initializer, Node, Parameter, Value
from autopipe.ir.measured_costs import (
    AffineTime,
    Costs,
    DeviceCosts,
    ExchangeCost,
    Operation,
    OperationCost,
    OperationSample,
    TaskCosts,
    Timing,
)
from autopipe.ir.output_files import scratch_folder
from autopipe.ir.placement import Placement, Stage, crossing_values
from autopipe.ir.problem import Mode, Optimizer, Problem
from autopipe.ir.program import Program
from autopipe.ir.schedule import Phase, Schedule, Task
from autopipe.passes.analysis.gradients import sent_bytes
from autopipe.passes.cost.measured import Operations, costed_work, measured_cluster
from autopipe.passes.cost.roofline import annotate
from autopipe.passes.frontend import Model
from autopipe.passes.lower.lower import lower, one_device_program
from autopipe.passes.pipeline import Request, read_for
from autopipe.passes.placement.pipedream import PipeDream
from autopipe.passes.schedule.predict import predict
from autopipe.passes.schedule.published.one_f_one_b import KForwardsKBackwards, stage_order
from autopipe.passes.schedule.simulate import simulate

_LAP = 400
"""Maximum number of samples in a lap. A few layers are representative of many."""
_LAP_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Group:
    """Samples that are measured together, in the order and as often as the model runs them."""

    note: str
    size: int
    """Number of samples of the batch per micro-batch."""
    lap: tuple[OperationSample, ...]


def models_of(request: Request, sizes: Sequence[int] | None) -> tuple[tuple[int, Model], ...]:
    """Return (size, model) for each micro-batch size in `sizes`. If `sizes` is None, use 1, 2, 4
    and the model's batch size, as far as the model supports them. Raise the first error if a size
    in `sizes` is not supported, or if no size is.
    """
    read = read_for(request, None)
    wanted = sizes or tuple(
        size for size in (1, 2, 4, read.batch or 1) if (read.batch or size) % size == 0
    )
    found: list[tuple[int, Model]] = []
    refused: list[AutopipeError] = []
    for size in dict.fromkeys(wanted):
        try:
            found.append((size, read if read.batch == size else read_for(request, size)))
        except AutopipeError as error:
            refused.append(error)
    if refused and (sizes is not None or not found):
        raise refused[0]
    return tuple(found)


def groups_of(
    models: Sequence[tuple[int, Model]], precision: str, degrees: Sequence[int]
) -> Iterator[Group]:
    """Yield all samples: the unsplit operators of each micro-batch size first, then the shards of
    operators that are split in each of `degrees`.

    If the losses of a model can keep or recompute their logits, both forms of the model are
    included.
    """
    seen: set[Operation] = set()
    forms = [(size, form) for size, model in models for form in model.forms]
    for degree in (1, *degrees):
        for size, model in forms:
            new = [
                sample
                for sample in samples_of(model, precision, degree)
                if sample.operation not in seen
            ]
            seen |= {sample.operation for sample in new}
            note = f"micro-batch {size}" + (f", split {degree} ways" if degree > 1 else "")
            yield from (Group(note, size, lap) for lap in _laps(new))


def samples_of(model: Model, precision: str, degree: int = 1) -> Iterator[OperationSample]:
    """Yield the samples to measure, for every node in order. Samples of equal nodes are created
    only once.
    """
    operations = Operations(model.graph, precision)
    known: dict[Hashable, tuple[OperationSample, ...]] = {}
    for index, work in enumerate(annotate(operations.graph, operations.precision)):
        if index in operations.absorbed:
            continue
        key = operations.key(index)
        if key not in known:
            cuts = operations.cuts(index, (degree,)) if degree > 1 else ((),)
            known[key] = tuple(operations.sample(index, work, splits) for splits in cuts)
        yield from known[key]


def _laps(samples: Sequence[OperationSample]) -> Iterator[tuple[OperationSample, ...]]:
    """Yield the samples in laps of limited length and memory. Each distinct operation occurs in a
    lap; repetitions of an operation may be dropped once a lap is full.
    """
    seen: set[Operation] = set()
    lap = list[OperationSample]()
    held = 0
    for sample in samples:
        size = bytes_of(sample)
        if len(lap) >= _LAP or held + size > _LAP_BYTES:
            if sample.operation in seen:
                continue
            if lap:
                yield tuple(lap)
            lap = []
            held = 0
        seen.add(sample.operation)
        lap.append(sample)
        held += size
    if lap:
        yield tuple(lap)


def bytes_of(sample: OperationSample) -> int:
    """Return the size in bytes of the operands and results, each with its gradient."""
    values = [value for each in sample.signatures for value in (*each.operands, *each.results)]
    return 2 * sum(value.bytes for value in values if value is not None)


def parsed_sizes(text: str, flag: str) -> tuple[int, ...]:
    """Parse integers of at least 1, separated by commas. Raise ConfigurationError for any other
    text.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if any(not word.isascii() or not word.isdigit() or not 0 < int(word) < 2**31 for word in words):
        raise ConfigurationError(
            f"{text!r} is not a list of positive integers", hint="use the format 1,2,4", where=flag
        )
    return tuple(int(word) for word in words)


_SHAPE = (4, 64, 64)
_OPERATORS = (
    "Mul",
    "MatMul",
    "Relu",
    "MatMul",
    "Softmax",
    "Add",
    "MatMul",
    "Tanh",
    "LayerNormalization",
    "MatMul",
    "Sigmoid",
    "MatMul",
    "Erf",
    "Abs",
)
"""Operators of a layer. The first one has a parameter, so that gradients flow through all matmuls
of both stages.
"""
_LAYERS = 3
"""Layers per stage."""
_FIRST_LAYERS = 2
"""Layers of the first stage, if the second stage must be the slower one."""
_MICRO_BATCHES = 4
_MANY_MICRO_BATCHES = 12
_WHOLE = 0
_SPLIT = 1
LONGER = 4
"""Ratio of the layers of the longer program to those of the shorter one. The constant time per task
follows from the times of both.
"""
MESSAGE_BYTES = 4 * math.prod(_SHAPE)
"""Size in bytes of one result that a stage sends to another."""


def write_overhead_stage(folder: Path) -> int:
    """Write a one-device program that trains two equal stages of different operators. The backward
    of the second is split. Return the number of its operators whose weight gradients are deferred.
    """
    phases = (
        (_WHOLE, Phase.FORWARD), (_SPLIT, Phase.FORWARD), (_SPLIT, Phase.INPUT_GRADIENT),
        (_SPLIT, Phase.WEIGHT_GRADIENT), (_WHOLE, Phase.BACKWARD),
    )  # fmt: skip
    _write(folder, (_LAYERS, _LAYERS), (0, 0), _in_turn(_MICRO_BATCHES, phases))
    return _OPERATORS.count("MatMul") * _LAYERS


def write_rows(folder: Path) -> tuple[Path, Path]:
    """Write two one-device programs of one stage each: one with a single layer, one with `LONGER`
    layers.
    """
    programs = folder / "short", folder / "long"
    schedule = _in_turn(_MICRO_BATCHES, ((0, Phase.FORWARD), (0, Phase.BACKWARD)))
    for layers, program in zip((1, LONGER), programs, strict=True):
        _write(program, (layers,), (0,), schedule)
    return programs


def write_pair(folder: Path, ranks: int, messages: int = 1) -> None:
    """Write a program of two stages under 1F1B, on one rank or on two. The second stage is slower.
    It reads `messages` results of the first stage, of `MESSAGE_BYTES` each.
    """
    if ranks == 1:
        phases = (0, Phase.FORWARD), (1, Phase.FORWARD), (1, Phase.BACKWARD), (0, Phase.BACKWARD)
        schedule = _in_turn(_MANY_MICRO_BATCHES, phases)
    else:
        numbers = range(_MANY_MICRO_BATCHES)
        orders = (
            stage_order(stage, in_flight=2 - stage, k=1, micro_batches=numbers, train=True)
            for stage in (0, 1)
        )
        schedule = Schedule(len(numbers), tuple(map(tuple, orders)))
    _write(folder, (_FIRST_LAYERS, _LAYERS), (0, ranks - 1), schedule, messages)


def _in_turn(count: int, phases: Sequence[tuple[int, Phase]]) -> Schedule:
    """Return a schedule for one device that runs `count` micro-batches one after the other.
    `phases` lists the stages and phases of each micro-batch in order.
    """
    return Schedule(
        count,
        (tuple(Task(stage, phase, index) for index in range(count) for stage, phase in phases),),
    )


def _write(
    folder: Path,
    layers: tuple[int, ...],
    devices: tuple[int, ...],
    schedule: Schedule,
    messages: int = 1,
) -> None:
    """Write a program with stages of these numbers of layers on these devices. Each stage but the
    first adds up the last `messages` results of the previous stage.
    """
    weights = {"matrix": _SHAPE[-1:] * 2, "vector": _SHAPE[-1:]}
    operands = {
        "MatMul": ("matrix",),
        "Mul": ("vector",),
        "Add": ("vector",),
        "LayerNormalization": ("vector",),
    }
    nodes: list[Node] = []
    before = "x"
    ends = []
    for stage, count in enumerate(layers):
        if stage and messages > 1:
            last = tuple(node.name for node in nodes[-messages:])
            nodes.append(Node(f"x{len(nodes)}", "Sum", last, (f"x{len(nodes)}",)))
            before = nodes[-1].name
        for op in _OPERATORS * count:
            names = (f"{name}{stage}" for name in operands.get(op, ()))
            nodes.append(Node(f"x{len(nodes)}", op, (before, *names), (f"x{len(nodes)}",)))
            before = nodes[-1].name
        ends.append(len(nodes))
    ends[-1] += 1
    nodes.append(Node("loss", "ReduceMean", (before,), ("loss",), (("keepdims", 0),)))
    graph = Graph(
        name="synthetic",
        opset=20,
        inputs=(Value("x", DType.FLOAT32, _SHAPE),),
        parameters=tuple(
            Parameter(Value(f"{name}{stage}", DType.FLOAT32, shape), Initializer("normal", 0.1))
            for stage in range(len(layers))
            for name, shape in weights.items()
        ),
        constants=(),
        nodes=tuple(nodes),
        outputs=("loss",),
        values=(
            *(Value(node.name, DType.FLOAT32, _SHAPE) for node in nodes[:-1]),
            Value("loss", DType.FLOAT32, ()),
        ),
        batch_axes=(("x", 0),),
    )
    stages = (
        Stage(tuple(range(begin, end)), (device,), _SHAPE[0])
        for begin, end, device in zip((0, *ends), ends, devices, strict=False)
    )
    program = lower(graph, Placement(tuple(stages)), schedule, "loss")
    _write_program(program, str(folder), "", Optimizer(), "fp32", folder)


def _write_program(
    program: Program, model: str, digest: str, optimizer: Optimizer, precision: str, to: Path
) -> None:
    stages, ranks = (
        ("Timed by the profiler.",) * len(each) for each in (program.stages, program.ranks)
    )
    provenance = Provenance(model, digest, "", optimizer, precision, 0, 0.0, 0.0)
    write_program([ProgramFiles("", program, stages, ranks)], provenance, to)


_MOST_BYTES = 2**32
"""Maximum size in bytes of the model with its activations. A larger model is not run as a whole."""
_STANDSTILL = Optimizer(lr=0.0)
"""The learning rate is 0 because some models diverge when they train on random samples for long."""


def is_small(model: Model, precision: str) -> bool:
    """Return True if the model is small enough to run as a whole."""
    return sum(map(bytes_of, samples_of(model, precision))) <= _MOST_BYTES


def write_timed(model: Model, precision: str, program: Program, folder: Path) -> None:
    """Write a program that runs training steps of the model with learning rate 0."""
    _write_program(
        program, str(model.path.absolute()), model.digest, _STANDSTILL, precision, folder
    )


_PIPELINE_MICRO_BATCHES = 8
_RANKS = 2


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A program of two stages under 1F1B."""

    folder: Path
    period_s: float
    """Predicted seconds between two micro-batches if sending and receiving take no time of the
    ranks.
    """
    messages: int
    """Number of values that one stage sends to the other."""
    size_bytes: int
    """Size of all these values in bytes."""


def write_pipeline(
    model: Model, precision: str, costs: DeviceCosts, folder: Path
) -> Pipeline | None:
    """Write the model as a program of two stages. According to `costs`, both take equal time,
    without the overhead of sending and receiving. Return None if the model is not trained, cannot
    be partitioned, or is too large.
    """
    if model.mode is not Mode.TRAIN or not is_small(model, precision):
        return None
    try:
        problem = _problem(model, precision, costs)
        placement = PipeDream(replicate=False).run(problem)
        if len(placement.stages) < _RANKS:
            return None
        schedule = KForwardsKBackwards().run(problem, placement)
        write_timed(
            model,
            precision,
            lower(model.graph, placement, schedule, model.loss, precision=precision),
            folder,
        )
    except AutopipeError:
        return None
    whole = sent_bytes(model.graph, precision)
    sizes = [whole[name] for name, _, _ in crossing_values(model.graph, placement)]
    devices = tuple(stage.devices for stage in placement.stages)
    timeline = simulate(schedule, devices, predict(problem, placement))
    starts = [
        span.start
        for span in timeline.spans
        if span.task.stage == 1 and span.task.phase is Phase.FORWARD
    ]
    return Pipeline(folder, median_forward_interval(starts), len(sizes), sum(sizes))


def _problem(model: Model, precision: str, costs: DeviceCosts) -> Problem:
    exchanges = tuple(each for each in costs.exchanges if each.kind not in ("post", "follow"))
    found = Costs((replace(costs, exchanges=exchanges),))
    cluster = measured_cluster(build_cluster(cluster_preset("cpu-local"), _RANKS), found)
    return Problem(
        graph=model.graph,
        work=costed_work(model.graph, precision, cluster, found),
        cluster=cluster,
        batch_size=_PIPELINE_MICRO_BATCHES * (model.batch or 1),
        micro_batches=_PIPELINE_MICRO_BATCHES,
        mode=model.mode,
        loss=model.loss,
        precision=precision,
        costs=found,
    )


_MESSAGES = 6
"""Number of messages per task in the program that measures the time of each message after the
first.
"""
_RUNS = 3
"""Number of runs of the model's pipeline. Their median is used, because the speed of a program
differs between processes.
"""


def exchanges_of(ranks: int, device: str, seconds: float) -> tuple[ExchangeCost, ...]:
    """Measure messages and collectives of up to `ranks` ranks, for about `seconds`, and the CPU
    time that sending and receiving take in small pipelines. Raise LaunchError if a rank fails.
    """
    found = measure_exchanges(ranks, device, seconds)
    with scratch_folder("profile") as scratch:
        together, apart, laden = (Path(scratch) / name for name in ("together", "apart", "laden"))
        for folder, count, messages in ((together, 1, 1), (apart, 2, 1), (laden, 2, _MESSAGES)):
            write_pair(folder, count, messages)
        ends = measure_post_overhead(together, apart, laden, _MESSAGES, device)
    costs: list[ExchangeCost] = []
    for each in found:
        if each.kind == "post":
            # The times of the first and of each further message follow from a pipeline. Their
            # increase per byte follows from messages alone.
            first, following = (_through(each.fit, seconds, MESSAGE_BYTES) for seconds in ends)
            costs += (replace(each, fit=first), ExchangeCost("follow", each.ranks, following, ()))
        else:
            costs.append(each)
    return tuple(costs)


def in_pipeline(
    exchanges: tuple[ExchangeCost, ...], pipeline: Pipeline, device: str
) -> tuple[ExchangeCost, ...]:
    """Return the communication costs with the time that sending and receiving take in the model's
    pipeline. Messages of a task after the first have their time in a small pipeline. Raise
    LaunchError if the pipeline fails.
    """
    # The time per byte is part of the first message's time.
    follow = next(each.fit.fixed_s for each in exchanges if each.kind == "follow")
    period = statistics.median(measure_period(pipeline.folder, device) for _ in range(_RUNS))
    both = period - pipeline.period_s
    first = max(0.0, both / 2 - (pipeline.messages - 1) * follow)
    return tuple(
        replace(each, fit=_through(each.fit, first, pipeline.size_bytes))
        if each.kind == "post"
        else each
        for each in exchanges
    )


def _through(line: AffineTime, seconds: float, size: int) -> AffineTime:
    """Return the line with the slope of `line` that has the value `seconds` at `size` bytes. If
    that line would be negative at 0 bytes, return the line through 0 instead.
    """
    if seconds < line.per_byte_s * size:
        return AffineTime(0.0, seconds / size)
    return AffineTime(seconds - line.per_byte_s * size, line.per_byte_s)


_MOST = 0.6
"""Maximum fraction of a task's time that its start overhead takes. Start overheads are measured on
tasks that are larger than the smallest tasks that occur.
"""


@dataclass(frozen=True, slots=True)
class ModelCorrection:
    """Factors by which operators are slower in the model than one by one, and the time of tasks
    besides their operators.
    """

    forward: float = 1.0
    backward: float = 1.0
    forward_s: float = 0.0
    """Seconds of a forward task besides its operators, including the start overhead."""
    backward_s: float = 0.0
    """Seconds of a backward task besides its operators, including the start overhead."""

    def tasks(self, costs: TaskCosts) -> TaskCosts:
        return replace(costs, forward_s=self.forward_s, backward_s=self.backward_s)

    def of(self, cost: OperationCost) -> OperationCost:
        forward = cost.forward
        backward = cost.backward
        if backward is not None:
            backward = replace(backward, seconds=backward.seconds * self.backward)
        return replace(
            cost,
            forward=replace(forward, seconds=forward.seconds * self.forward),
            backward=backward,
        )


def measure_whole(
    model: Model,
    precision: str,
    costs: Iterable[OperationCost],
    tasks: TaskCosts | None,
    starts: TaskStartOverhead,
    device: str,
    folder: Path,
    seconds: float,
) -> ModelCorrection | None:
    """Run the model for about `seconds` and compare its times with the sums of its operators'
    times.

    `costs` are the measured times of its operations and `starts` the start overhead of a task.
    Files go to `folder`. Return None if some operation of the model was not measured, or if the
    model is too large or does not run in one process.
    """
    samples = tuple(samples_of(model, precision))
    known = {each.operation: each for each in costs}
    own = [known[sample.operation] for sample in samples if sample.operation in known]
    if len(own) < len(samples) or not is_small(model, precision):
        return None
    # Several forwards and backwards run one after the other. A single forward would find the caches
    # in the state in which the update left them.
    loss = model.loss if model.mode is Mode.TRAIN else None
    try:
        program = one_device_program(model.graph, _MICRO_BATCHES, model.batch or 1, loss)
        write_timed(model, precision, program, folder)
        forward, backward, around_forward, around_backward = measure_in_process(
            "whole", folder, device, seconds
        )
    except AutopipeError:
        return None
    if tasks is not None:
        # All backwards of a step except the first add their gradients to earlier gradients.
        sizes = [each.value.bytes for each in model.graph.parameters if each.trainable]
        backward -= (1 - 1 / _MICRO_BATCHES) * tasks.accumulate.seconds(len(sizes), sum(sizes))
    first = min(starts.forward_s, _MOST * forward)
    last = min(starts.backward_s, _MOST * max(0.0, backward))
    return ModelCorrection(
        _ratio(forward - first, [each.forward for each in own]),
        _ratio(backward - last, [each.backward for each in own if each.backward is not None]),
        around_forward + first,
        around_backward + last,
    )


def _ratio(whole: float, parts: Sequence[Timing]) -> float:
    total = sum(each.seconds for each in parts)
    return whole / total if total > 0 and whole > 0 else 1.0
