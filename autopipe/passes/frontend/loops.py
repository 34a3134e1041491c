"""A body that runs many times as one operator: typed once, and what is the same in all runs
computed before them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import Constant, DType, Graph, Node, Value
from autopipe.ir.ops import operator_of, signature_of
from autopipe.ir.ops.loop import LOOP
from autopipe.passes.frontend.cleanup import cleaned
from autopipe.passes.frontend.control_flow import MOST_REPEATED, Runs, Scanned
from autopipe.passes.frontend.fusion.rules import fused
from autopipe.passes.frontend.inference import RANDOM


def inner_types(runs: Runs, types: Mapping[str, Value]) -> dict[str, Value]:
    """The types of what a run is given."""
    found = {runs.number: Value(runs.number, DType.INT64, ())}
    found |= {state.name: replace(types[state.operand], name=state.name) for state in runs.states}
    for each in runs.scanned:
        whole = types[each.operand]
        axis = each.axis % len(whole.shape)
        found[each.name] = Value(
            each.name, whole.dtype, whole.shape[:axis] + whole.shape[axis + 1 :]
        )
    return found


def loop_of(
    runs: Runs,
    nodes: Sequence[Node],
    types: Mapping[str, Value],
    arrays: Mapping[str, np.ndarray],
    aliases: Mapping[str, str],
    opset: int,
) -> tuple[list[Node], Node, list[Constant], list[Value]]:
    """The nodes that stand before a loop, the loop, the body's constants that are new, and the
    types of its results.

    `nodes` are those of one run. Raises ModelError where no operator can run them again and again.
    """
    if not all(arrays.get(aliases.get(name, name), np.False_).all() for name in runs.ends):
        raise ModelError("when it ends depends on data")
    before, inner, scanned = _divided(runs, nodes, types)
    results = [each.result for each in runs.states] + [each.result for each in runs.gathered]
    results = [aliases.get(name, name) for name in results]
    for state, result in zip(runs.states, results, strict=False):
        first = types[state.operand]
        following = types[result]
        if (first.dtype, first.shape) != (following.dtype, following.shape):
            raise ModelError(
                f"{state.name!r} is another tensor after a run: {list(first.shape)} before it"
            )
    given = [runs.number, *(each.name for each in runs.states), *(each.name for each in scanned)]
    written = {name for node in inner for name in node.outputs}
    read = dict.fromkeys(
        name for each in (*(node.inputs for node in inner), results) for name in each if name
    )
    same = [name for name in read if name not in written and name not in given]
    held = [name for name in same if name in arrays]
    body = Graph(
        name=runs.title,
        opset=opset,
        inputs=tuple(
            types[name] for name in (*given, *(name for name in same if name not in arrays))
        ),
        parameters=(),
        constants=tuple(Constant(types[name], arrays[name]) for name in held),
        nodes=tuple(inner),
        outputs=tuple(results),
        values=tuple(types[name] for node in inner for name in node.outputs if name),
    )
    body = fused(cleaned(body))
    _require_repeatable(body)
    needed = {*given, *body.outputs, *(name for node in body.nodes for name in node.inputs)}
    body = replace(body, inputs=tuple(value for value in body.inputs if value.name in needed))
    operands = [each.operand for each in runs.states] + [each.operand for each in scanned]
    operands += [value.name for value in body.inputs[len(given) :]]
    outputs = [each.output for each in runs.states] + [each.output for each in runs.gathered]
    made = [
        replace(types[result], name=state.output)
        for state, result in zip(runs.states, results, strict=False)
    ]
    axes = []
    for each, result in zip(runs.gathered, results[len(runs.states) :], strict=True):
        shape = types[result].shape
        axes.append(each.axis % (len(shape) + 1))
        made.append(
            Value(
                each.output,
                types[result].dtype,
                (*shape[: axes[-1]], runs.count, *shape[axes[-1] :]),
            )
        )
    domain, _, op = LOOP.partition(".")
    loop = Node(
        runs.name or op,
        op,
        (*operands, *(each.value.name for each in body.constants)),
        tuple(outputs),
        (
            ("count", runs.count),
            ("gather_axes", tuple(axes)),
            ("gather_directions", tuple(int(each.backwards) for each in runs.gathered)),
            ("scan_axes", tuple(each.axis % len(types[each.operand].shape) for each in scanned)),
            ("scan_directions", tuple(int(each.backwards) for each in scanned)),
            ("states", len(runs.states)),
        ),
        domain,
        body,
    )
    added = [each for each in body.constants if each.value.name not in arrays]
    return before, loop, added, [value for value in made if value.name]


def _divided(
    runs: Runs, nodes: Sequence[Node], types: Mapping[str, Value]
) -> tuple[list[Node], list[Node], list[Scanned]]:
    """The nodes that compute the same in all runs, the others, and what the loop goes through."""
    before = list[Node]()
    inner = list[Node]()
    scanned = list(runs.scanned)
    changing = {runs.number, *(each.name for each in runs.states), *(each.name for each in scanned)}
    for node in nodes:
        if node.op in RANDOM:
            raise ModelError("its body draws random numbers, in each run others")
        if changing.isdisjoint(node.inputs):
            before.append(node)
            continue
        changing.update(node.outputs)
        # A row for each run, as exporters write `x[i]`, is a slice: the gradient of a row alone is
        # as large as all.
        if node.op == "Gather" and not node.domain and node.inputs[1] == runs.number:
            axis = node.integer("axis") % len(types[node.inputs[0]].shape)
            if node.inputs[0] not in changing and types[node.inputs[0]].shape[axis] == runs.count:
                scanned.append(Scanned(node.inputs[0], axis, False, node.outputs[0]))
                continue
        inner.append(node)
    return before, inner, scanned


def _require_repeatable(body: Graph) -> None:
    """Raise ModelError where a node of a body cannot be an operator that runs again and again."""
    if len(body.nodes) > MOST_REPEATED:
        raise ModelError(f"its body has more than {MOST_REPEATED} nodes")
    for node in body.nodes:
        row = operator_of(node)
        where = f"{node.op} {node.name!r}"
        if row is None or node.body is not None:
            raise ModelError(
                f"its body has {'a loop' if node.body else 'an unsupported operator'}, {where}"
            )
        signature = signature_of(body, node)
        if row.mixes_samples(signature):
            raise ModelError(f"{where} mixes the samples of a batch")
        if any(signature.present(each) and signature.constant(each) is None for each in row.static):
            raise ModelError(f"the settings of {where} change from run to run")
