"""Synthetic programs from which the profiler measures the overhead of tasks and messages: stages of
small operators, on one rank or on two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from autopipe.backends.torch.codegen.program import ProgramFiles, Provenance, write_program
from autopipe.ir.graph import DType, Graph, Initializer, Node, Parameter, Value
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Optimizer
from autopipe.ir.program import Program
from autopipe.ir.schedule import Phase, Schedule, Task
from autopipe.passes.lower.lower import lower
from autopipe.passes.schedule.published.one_f_one_b import stage_order

_ACTIVATION_SHAPE = (4, 64, 64)
"""Shape of the result of each operator: samples, rows, columns."""
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
SHORT_STEP_MICRO_BATCHES = 4
"""Number of micro-batches of a step on one device."""
_PIPELINE_MICRO_BATCHES = 12
"""Number of micro-batches of a step of two stages."""
_STAGE_WITH_BACKWARD = 0
"""The stage whose backward is one task."""
_STAGE_WITH_SPLIT_BACKWARD = 1
"""The stage whose backward is split into input gradients and weight gradients."""
LONGER = 4
"""Ratio of the layers of the longer program to those of the shorter one. The constant time per task
follows from the times of both.
"""
MESSAGE_BYTES = 4 * math.prod(_ACTIVATION_SHAPE)
"""Size in bytes of one result that a stage sends to another."""


def write_overhead_stage(folder: Path) -> int:
    """Write a one-device program that trains two equal stages of different operators. The backward
    of the second is split. Return the number of its operators whose weight gradients are deferred.
    """
    phases = (
        (_STAGE_WITH_BACKWARD, Phase.FORWARD),
        (_STAGE_WITH_SPLIT_BACKWARD, Phase.FORWARD),
        (_STAGE_WITH_SPLIT_BACKWARD, Phase.INPUT_GRADIENT),
        (_STAGE_WITH_SPLIT_BACKWARD, Phase.WEIGHT_GRADIENT),
        (_STAGE_WITH_BACKWARD, Phase.BACKWARD),
    )
    _write_synthetic(
        folder, (_LAYERS, _LAYERS), (0, 0), _sequential_schedule(SHORT_STEP_MICRO_BATCHES, phases)
    )
    return _OPERATORS.count("MatMul") * _LAYERS


def write_rows(folder: Path) -> tuple[Path, Path]:
    """Write two one-device programs of one stage each and return their folders (short, long). The
    stage is a row of layers: a single layer in the first program, `LONGER` layers in the second.
    """
    programs = folder / "short", folder / "long"
    schedule = _sequential_schedule(
        SHORT_STEP_MICRO_BATCHES, ((0, Phase.FORWARD), (0, Phase.BACKWARD))
    )
    for layers, program in zip((1, LONGER), programs, strict=True):
        _write_synthetic(program, (layers,), (0,), schedule)
    return programs


def write_pair(folder: Path, ranks: int, messages: int = 1) -> None:
    """Write a program of two stages to `folder`: on one rank, one micro-batch after another, or on
    two ranks under 1F1B. The second stage is slower. It reads `messages` results of the first
    stage, of `MESSAGE_BYTES` each.
    """
    if ranks == 1:
        phases = (0, Phase.FORWARD), (1, Phase.FORWARD), (1, Phase.BACKWARD), (0, Phase.BACKWARD)
        schedule = _sequential_schedule(_PIPELINE_MICRO_BATCHES, phases)
    else:
        numbers = range(_PIPELINE_MICRO_BATCHES)
        orders = (
            stage_order(stage, in_flight=2 - stage, k=1, micro_batches=numbers, train=True)
            for stage in (0, 1)
        )
        schedule = Schedule(len(numbers), tuple(map(tuple, orders)))
    _write_synthetic(folder, (_FIRST_LAYERS, _LAYERS), (0, ranks - 1), schedule, messages)


def _sequential_schedule(count: int, phases: Sequence[tuple[int, Phase]]) -> Schedule:
    """Return a schedule for one device that runs `count` micro-batches one after the other.
    `phases` lists the stages and phases of each micro-batch in order.
    """
    return Schedule(
        count,
        (tuple(Task(stage, phase, index) for index in range(count) for stage, phase in phases),),
    )


def _write_synthetic(
    folder: Path,
    layers: tuple[int, ...],
    devices: tuple[int, ...],
    schedule: Schedule,
    messages: int = 1,
) -> None:
    """Write a program with stages of these numbers of layers on these devices. Each stage but the
    first adds up the last `messages` results of the previous stage.
    """
    weights = {"matrix": _ACTIVATION_SHAPE[-1:] * 2, "vector": _ACTIVATION_SHAPE[-1:]}
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
        inputs=(Value("x", DType.FLOAT32, _ACTIVATION_SHAPE),),
        parameters=tuple(
            Parameter(Value(f"{name}{stage}", DType.FLOAT32, shape), Initializer("normal", 0.1))
            for stage in range(len(layers))
            for name, shape in weights.items()
        ),
        constants=(),
        nodes=tuple(nodes),
        outputs=("loss",),
        values=(
            *(Value(node.name, DType.FLOAT32, _ACTIVATION_SHAPE) for node in nodes[:-1]),
            Value("loss", DType.FLOAT32, ()),
        ),
        batch_axes=(("x", 0),),
    )
    stages = (
        Stage(tuple(range(begin, end)), (device,), _ACTIVATION_SHAPE[0])
        for begin, end, device in zip((0, *ends), ends, devices, strict=False)
    )
    program = lower(graph, Placement(tuple(stages)), schedule, "loss")
    write_timed_program(program, str(folder), "", Optimizer(), "fp32", folder)


def write_timed_program(
    program: Program, model: str, digest: str, optimizer: Optimizer, precision: str, folder: Path
) -> None:
    """Write a program whose tasks the profiler times into `folder`. `model` is the path of the ONNX
    file and `digest` its digest, both "" for a synthetic program.
    """
    stages, ranks = (
        ("Timed by the profiler.",) * len(each) for each in (program.stages, program.ranks)
    )
    provenance = Provenance(model, digest, "", optimizer, precision, 0, 0.0, 0.0)
    write_program([ProgramFiles("", program, stages, ranks)], provenance, folder)
