"""A small program of many operators, by which it is measured what tasks take besides them."""

from __future__ import annotations

from pathlib import Path

from autopipe.backends.torch.emission.folder import ProgramFiles, write_program
from autopipe.backends.torch.emission.manifest import Provenance
from autopipe.ir.dtype import DType
from autopipe.ir.graph import Graph, Initializer, Node, Parameter, Value
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Optimizer
from autopipe.ir.schedule import Phase, Schedule, Task
from autopipe.passes.lower.assemble import lower

_SHAPE = (4, 64, 64)
_OPERATORS = (
    "Mul", "MatMul", "Relu", "MatMul", "Softmax", "Add", "MatMul", "Tanh", "LayerNormalization", "MatMul",
    "Sigmoid", "MatMul", "Erf", "Abs",
)  # fmt: skip
"""Of a layer; the first has a parameter, so that gradients flow through all products of both stages."""
_LAYERS = 3
"""Of a stage."""
_MICRO_BATCHES = 4
_WHOLE, _SPLIT = 0, 1


def write_medley(folder: Path) -> int:
    """Write a one-device program that trains two stages of the same layers of different operators.

    The backward of the second is split. Returns how many of its operators' parameters have gradients that wait.
    """
    weights = {"matrix": _SHAPE[-1:] * 2, "vector": _SHAPE[-1:]}
    operands = {"MatMul": ("matrix",), "Mul": ("vector",), "Add": ("vector",), "LayerNormalization": ("vector",)}
    nodes: list[Node] = []
    before, length = "x", len(_OPERATORS) * _LAYERS
    for number, op in enumerate(_OPERATORS * (2 * _LAYERS)):
        names = (f"{name}{number // length}" for name in operands.get(op, ()))
        nodes.append(Node(f"x{number}", op, (before, *names), (f"x{number}",)))
        before = f"x{number}"
    nodes.append(Node("loss", "ReduceMean", (before,), ("loss",), (("keepdims", 0),)))
    graph = Graph(
        name="medley",
        opset=20,
        inputs=(Value("x", DType.FLOAT32, _SHAPE),),
        parameters=tuple(
            Parameter(Value(f"{name}{stage}", DType.FLOAT32, shape), Initializer("normal", 0.1))
            for stage in (_WHOLE, _SPLIT)
            for name, shape in weights.items()
        ),
        constants=(),
        nodes=tuple(nodes),
        outputs=("loss",),
        values=(*(Value(node.name, DType.FLOAT32, _SHAPE) for node in nodes[:-1]), Value("loss", DType.FLOAT32, ())),
        batch_axes=(("x", 0),),
    )
    phases = (
        (_WHOLE, Phase.FORWARD), (_SPLIT, Phase.FORWARD), (_SPLIT, Phase.INPUT_GRADIENT),
        (_SPLIT, Phase.WEIGHT_GRADIENT), (_WHOLE, Phase.BACKWARD),
    )  # fmt: skip
    order = tuple(Task(stage, phase, index) for index in range(_MICRO_BATCHES) for stage, phase in phases)
    halves = tuple(range(length)), tuple(range(length, len(nodes)))
    placement = Placement(tuple(Stage(half, (0,), _SHAPE[0]) for half in halves))
    program = lower(graph, placement, Schedule(_MICRO_BATCHES, (order,)), "loss")
    files = ProgramFiles("", program, ("A medley.",) * 2, ("A medley.",))
    write_program([files], Provenance(str(folder), "", "", Optimizer(), "fp32", 0, 0.0, 0.0), folder)
    return _OPERATORS.count("MatMul") * _LAYERS
