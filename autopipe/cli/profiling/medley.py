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
from autopipe.passes.lower import lower

_SHAPE = (4, 64, 64)
_OPERATORS = ("MatMul", "Relu", "Softmax", "Mul", "Tanh", "LayerNormalization", "Sigmoid", "Add", "Erf", "Abs")
_REPEATS = 4
_MICRO_BATCHES = 4


def write_medley(folder: Path) -> None:
    """Write a one-device program that trains several layers of different operators, one after the other."""
    weights = {"matrix": _SHAPE[-1:] * 2, "vector": _SHAPE[-1:]}
    operands = {"MatMul": ("matrix",), "Mul": ("vector",), "Add": ("vector",), "LayerNormalization": ("vector",)}
    nodes: list[Node] = []
    before = "x"
    for number, op in enumerate(_OPERATORS * _REPEATS):
        after = f"x{number}"
        nodes.append(Node(after, op, (before, *operands.get(op, ())), (after,)))
        before = after
    nodes.append(Node("loss", "ReduceMean", (before,), ("loss",), (("keepdims", 0),)))
    graph = Graph(
        name="medley",
        opset=20,
        inputs=(Value("x", DType.FLOAT32, _SHAPE),),
        parameters=tuple(
            Parameter(Value(name, DType.FLOAT32, shape), Initializer("normal", 0.1)) for name, shape in weights.items()
        ),
        constants=(),
        nodes=tuple(nodes),
        outputs=("loss",),
        values=(*(Value(node.name, DType.FLOAT32, _SHAPE) for node in nodes[:-1]), Value("loss", DType.FLOAT32, ())),
        batch_axes=(("x", 0),),
    )
    order = tuple(Task(0, phase, index) for index in range(_MICRO_BATCHES) for phase in (Phase.FORWARD, Phase.BACKWARD))
    placement = Placement((Stage(tuple(range(len(nodes))), (0,), _SHAPE[0]),))
    program = lower(graph, placement, Schedule(_MICRO_BATCHES, (order,)), "loss")
    files = ProgramFiles("", program, ("A medley.",), ("A medley.",))
    write_program([files], Provenance(str(folder), "", "", Optimizer(), "fp32", 0, 0.0, 0.0), folder)
