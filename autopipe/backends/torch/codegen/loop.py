"""Conversion of the body of a loop operator to a stage, from which code is generated. Shapes are
local if the loop is split.
"""

from __future__ import annotations

from dataclasses import replace

from autopipe.ir.graph import Value
from autopipe.ir.ops import signature_of
from autopipe.ir.ops.loop import loop_body, splittable_axes
from autopipe.ir.placement import Split
from autopipe.ir.program import Compute, StageCode


def loop_body_stage(loop: Compute) -> StageCode:
    """Return one iteration of a loop as a stage. The inputs of the stage are the values that differ
    between iterations. Its parameters and constants are the values that are equal in all
    iterations.
    """
    node = loop.signature.node
    body = loop_body(loop.signature.node)
    degrees = {split.axis: split.degree for split in loop.splits}
    axes = [axis for axis in splittable_axes(node) if axis.name in degrees]
    cuts = {place: degrees[axis.name] for axis in axes for place in axis.dimensions.items()}

    def local(name: str) -> Value | None:
        """Return the value of the body called `name` with its local shape, or None for an absent
        value, whose name is "".
        """
        if not name:
            return None
        value = body.type_of(name)
        extents = (extent // cuts.get((name, place), 1) for place, extent in enumerate(value.shape))
        return replace(value, shape=tuple(extents))

    def known(name: str) -> Value:
        """Return the value of the body called `name`, which must not be absent, with its local
        shape.
        """
        value = local(name)
        assert value is not None
        return value

    operations = []
    for index, each in enumerate(body.nodes):
        operands, results = (tuple(map(local, names)) for names in (each.inputs, each.outputs))
        splits = tuple(
            Split(axis.nodes[index], degrees[axis.name]) for axis in axes if index in axis.nodes
        )
        operations.append(
            Compute(index, signature_of(body, each).sharded(operands, results), splits)
        )
    changing = 1 + node.integer("states") + len(node.integers("scan_axes"))
    return StageCode(
        stage=0,
        devices=(0,),
        inputs=tuple(known(value.name) for value in body.inputs[:changing]),
        outputs=tuple(map(known, body.outputs)),
        parameters=tuple(
            (place, known(value.name)) for place, value in enumerate(body.inputs[changing:])
        ),
        constants=tuple(enumerate(body.constants)),
        operations=tuple(operations),
    )
