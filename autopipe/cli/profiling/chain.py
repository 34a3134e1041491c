"""Programs of next to no work, which show what tasks take besides their operators."""

from __future__ import annotations

import itertools
from pathlib import Path

from autopipe.backends.torch.emission.folder import ProgramFiles, write_program
from autopipe.backends.torch.emission.manifest import Provenance
from autopipe.ir.dtype import DType
from autopipe.ir.graph import Fill, Graph, Node, Parameter, Value
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Optimizer
from autopipe.ir.schedule import Phase, Schedule, Task
from autopipe.passes.lower import lower

CHAINS = (4, 20)
"""Nodes of the programs by which tasks are measured."""
_MICRO_BATCHES = 8


def write_chain(nodes: int, folder: Path) -> None:
    """Write a one-device program that trains a chain of so many nodes: products of small vectors, and their mean."""
    names = ["x", *(f"x{index}" for index in range(1, nodes)), "loss"]
    vector = [Value(name, DType.FLOAT32, (1,)) for name in names[:-1]]
    weight = Parameter(Value("w", DType.FLOAT32, (1,)), Fill(1.0))
    products = [Node(after, "Mul", (before, "w"), (after,)) for before, after in itertools.pairwise(names[:-1])]
    mean = Node("loss", "ReduceMean", (names[-2],), ("loss",), (("keepdims", 0),))
    graph = Graph(
        name="chain",
        opset=20,
        inputs=(vector[0],),
        parameters=(weight,),
        constants=(),
        nodes=(*products, mean),
        outputs=("loss",),
        values=(*vector[1:], Value("loss", DType.FLOAT32, ())),
        batch_axes=(("x", 0),),
    )
    order = tuple(Task(0, phase, index) for index in range(_MICRO_BATCHES) for phase in (Phase.FORWARD, Phase.BACKWARD))
    placement = Placement((Stage(tuple(range(nodes)), (0,), 1),))
    program = lower(graph, placement, Schedule(_MICRO_BATCHES, (order,)), "loss")
    files = ProgramFiles("", program, ("A chain.",), ("A chain.",))
    write_program([files], Provenance(str(folder), "", "", Optimizer(), "fp32", 0, 0.0, 0.0), folder)
