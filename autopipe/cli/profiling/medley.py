"""A small program of many operators, by which it is measured what tasks take besides them."""

from __future__ import annotations

import math
from pathlib import Path

from autopipe.backends.torch.emission.program import ProgramFiles, Provenance, write_program
from autopipe.ir.graph import DType, Graph, Initializer, Node, Parameter, Value
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Optimizer
from autopipe.ir.schedule import Phase, Schedule, Task
from autopipe.passes.lower.lower import lower
from autopipe.passes.schedule.published.one_f_one_b import stage_order

_SHAPE = (4, 64, 64)
_OPERATORS = (
    "Mul", "MatMul", "Relu", "MatMul", "Softmax", "Add", "MatMul", "Tanh", "LayerNormalization", "MatMul",
    "Sigmoid", "MatMul", "Erf", "Abs",
)  # fmt: skip
"""Of a layer; the first has a parameter, so that gradients flow through all products of both stages."""
_LAYERS = 3
"""Of a stage."""
_FIRST_LAYERS = 2
"""Of the first of two stages of which the second shall be the slower one."""
_MICRO_BATCHES = 4
_MANY_MICRO_BATCHES = 12
_WHOLE, _SPLIT = 0, 1
LONGER = 4
"""How many times as many layers the longer one of two stages has, by which it is measured what any stage takes."""
MESSAGE_BYTES = 4 * math.prod(_SHAPE)
"""Of what one stage sends to another."""


def write_overhead_stage(folder: Path) -> int:
    """Write a one-device program that trains two stages of the same layers of different operators.

    The backward of the second is split. Returns how many of its operators' parameters have gradients that wait.
    """
    phases = (
        (_WHOLE, Phase.FORWARD), (_SPLIT, Phase.FORWARD), (_SPLIT, Phase.INPUT_GRADIENT),
        (_SPLIT, Phase.WEIGHT_GRADIENT), (_WHOLE, Phase.BACKWARD),
    )  # fmt: skip
    order = tuple(Task(stage, phase, index) for index in range(_MICRO_BATCHES) for stage, phase in phases)
    _write(folder, (_LAYERS, _LAYERS), (0, 0), Schedule(_MICRO_BATCHES, (order,)))
    return _OPERATORS.count("MatMul") * _LAYERS


def write_rows(folder: Path) -> tuple[Path, Path]:
    """Write two one-device programs of one stage each, of one layer and of `LONGER` layers."""
    programs = folder / "short", folder / "long"
    phases = Phase.FORWARD, Phase.BACKWARD
    order = tuple(Task(0, phase, index) for index in range(_MICRO_BATCHES) for phase in phases)
    for layers, program in zip((1, LONGER), programs, strict=True):
        _write(program, (layers,), (0,), Schedule(_MICRO_BATCHES, (order,)))
    return programs


def write_pair(folder: Path, ranks: int, messages: int = 1) -> None:
    """Write a program of two stages, of which the second is slower, on one rank or on two under 1F1B.

    The second reads `messages` results of the first, of `MESSAGE_BYTES` each.
    """
    numbers = range(_MANY_MICRO_BATCHES)
    if ranks == 1:
        phases = (0, Phase.FORWARD), (1, Phase.FORWARD), (1, Phase.BACKWARD), (0, Phase.BACKWARD)
        orders: list[list[Task]] = [[Task(stage, phase, index) for index in numbers for stage, phase in phases]]
    else:
        orders = [stage_order(stage, warm_up=2 - stage, k=1, micro_batches=numbers, train=True) for stage in (0, 1)]
    schedule = Schedule(len(numbers), tuple(map(tuple, orders)))
    _write(folder, (_FIRST_LAYERS, _LAYERS), (0, ranks - 1), schedule, messages)


def _write(
    folder: Path, layers: tuple[int, ...], devices: tuple[int, ...], schedule: Schedule, messages: int = 1
) -> None:
    """Write the program of stages of these numbers of layers, on these devices; each adds up `messages` results of the
    one before.
    """
    weights = {"matrix": _SHAPE[-1:] * 2, "vector": _SHAPE[-1:]}
    operands = {"MatMul": ("matrix",), "Mul": ("vector",), "Add": ("vector",), "LayerNormalization": ("vector",)}
    nodes: list[Node] = []
    before, ends = "x", []
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
        name="medley",
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
        values=(*(Value(node.name, DType.FLOAT32, _SHAPE) for node in nodes[:-1]), Value("loss", DType.FLOAT32, ())),
        batch_axes=(("x", 0),),
    )
    stages = (
        Stage(tuple(range(begin, end)), (device,), _SHAPE[0])
        for begin, end, device in zip((0, *ends), ends, devices, strict=False)
    )
    program = lower(graph, Placement(tuple(stages)), schedule, "loss")
    titles = ("A medley.",) * len(layers), ("A medley.",) * schedule.devices
    files = ProgramFiles("", program, *titles)
    write_program([files], Provenance(str(folder), "", "", Optimizer(), "fp32", 0, 0.0, 0.0), folder)
