"""Construction of loop operators: loops that are not unrolled, whose body is a graph of its own.
The types in the body are inferred once. Nodes of the body with equal results in all iterations move
in front of the loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import Constant, DType, Graph, Node, Value
from autopipe.ir.ops import operator_of, signature_of
from autopipe.ir.ops.loop import LOOP
from autopipe.passes.frontend.cleanup import clean_graph
from autopipe.passes.frontend.control_flow import MAX_UNROLLED_NODES, KeptLoop, ScanInput
from autopipe.passes.frontend.fusion.rules import fuse_operators
from autopipe.passes.frontend.inference import RANDOM


def body_input_types(kept: KeptLoop, types: Mapping[str, Value]) -> dict[str, Value]:
    """Return the types of the values that the body of a loop receives in each iteration: the
    iteration number, the states, and slices of the scan inputs. `types` contains the types of
    values outside of the loop.
    """
    found = {kept.number: Value(kept.number, DType.INT64, ())}
    found |= {state.name: replace(types[state.operand], name=state.name) for state in kept.states}
    for each in kept.scanned:
        full = types[each.operand]
        axis = each.axis % len(full.shape)
        found[each.name] = Value(each.name, full.dtype, full.shape[:axis] + full.shape[axis + 1 :])
    return found


def build_loop(
    kept: KeptLoop,
    nodes: Sequence[Node],
    types: Mapping[str, Value],
    arrays: Mapping[str, np.ndarray],
    aliases: Mapping[str, str],
    opset: int,
) -> tuple[list[Node], Node, list[Constant], list[Value]]:
    """Build a loop operator and return four things:

    - the nodes that are computed once, before the loop;
    - the loop node;
    - the constants of the body that are not yet constants of the graph;
    - the types of the loop's results.

    `nodes` are the nodes of the body; `types`, `arrays` and `aliases` contain the types, known data
    and other names of values. Raises ModelError if the body is not supported in a loop operator.
    """
    if not all(arrays.get(aliases.get(name, name), np.False_).all() for name in kept.ends):
        raise ModelError("the condition that ends the loop depends on data")
    before, inner, scanned = _split_body(kept, nodes, types)
    results = [each.result for each in kept.states] + [each.result for each in kept.gathered]
    results = [aliases.get(name, name) for name in results]
    for state, result in zip(kept.states, results, strict=False):
        first = types[state.operand]
        following = types[result]
        if (first.dtype, first.shape) != (following.dtype, following.shape):
            raise ModelError(
                f"loop-carried state {state.name!r} changes from "
                f"{first.dtype.value}{list(first.shape)} "
                f"to {following.dtype.value}{list(following.shape)}"
            )
    given = [kept.number, *(each.name for each in kept.states), *(each.name for each in scanned)]
    written = {name for node in inner for name in node.outputs}
    read = dict.fromkeys(
        name for each in (*(node.inputs for node in inner), results) for name in each if name
    )
    same = [name for name in read if name not in written and name not in given]
    held = [name for name in same if name in arrays]
    body = Graph(
        name=kept.title,
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
    body = fuse_operators(clean_graph(body))
    _require_supported_body(body)
    needed = {*given, *body.outputs, *(name for node in body.nodes for name in node.inputs)}
    body = replace(body, inputs=tuple(value for value in body.inputs if value.name in needed))
    operands = [each.operand for each in kept.states] + [each.operand for each in scanned]
    operands += [value.name for value in body.inputs[len(given) :]]
    outputs = [each.output for each in kept.states] + [each.output for each in kept.gathered]
    made = [
        replace(types[result], name=state.output)
        for state, result in zip(kept.states, results, strict=False)
    ]
    axes = []
    for each, result in zip(kept.gathered, results[len(kept.states) :], strict=True):
        shape = types[result].shape
        axes.append(each.axis % (len(shape) + 1))
        made.append(
            Value(
                each.output,
                types[result].dtype,
                (*shape[: axes[-1]], kept.count, *shape[axes[-1] :]),
            )
        )
    domain, _, op = LOOP.partition(".")
    loop = Node(
        kept.name or op,
        op,
        (*operands, *(each.value.name for each in body.constants)),
        tuple(outputs),
        (
            ("count", kept.count),
            ("gather_axes", tuple(axes)),
            ("gather_directions", tuple(int(each.backwards) for each in kept.gathered)),
            ("scan_axes", tuple(each.axis % len(types[each.operand].shape) for each in scanned)),
            ("scan_directions", tuple(int(each.backwards) for each in scanned)),
            ("states", len(kept.states)),
        ),
        domain,
        body,
    )
    added = [each for each in body.constants if each.value.name not in arrays]
    return before, loop, added, [value for value in made if value.name]


def _split_body(
    kept: KeptLoop, nodes: Sequence[Node], types: Mapping[str, Value]
) -> tuple[list[Node], list[Node], list[ScanInput]]:
    """Split the nodes of the body, and return (nodes with equal results in all iterations, other
    nodes, scan inputs). Raises ModelError if a node draws random numbers.
    """
    before = list[Node]()
    inner = list[Node]()
    scanned = list(kept.scanned)
    changing = {kept.number, *(each.name for each in kept.states), *(each.name for each in scanned)}
    for node in nodes:
        if node.op in RANDOM:
            raise ModelError(f"the body contains {node.op}, which samples random numbers")
        if changing.isdisjoint(node.inputs):
            before.append(node)
            continue
        changing.update(node.outputs)
        # A Gather of x[i] becomes a scan input if i is the iteration number. Its gradient would
        # otherwise require the size of x in each iteration.
        if node.op == "Gather" and not node.domain and node.inputs[1] == kept.number:
            axis = node.integer("axis") % len(types[node.inputs[0]].shape)
            if node.inputs[0] not in changing and types[node.inputs[0]].shape[axis] == kept.count:
                scanned.append(ScanInput(node.inputs[0], axis, False, node.outputs[0]))
                continue
        inner.append(node)
    return before, inner, scanned


def _require_supported_body(body: Graph) -> None:
    """Raise ModelError if a loop operator cannot have this body: it has too many nodes, or contains
    a loop, an unsupported operator, a node that mixes samples, or an operand that must be constant
    but is not.
    """
    if len(body.nodes) > MAX_UNROLLED_NODES:
        raise ModelError(
            f"the number of nodes of the body is {len(body.nodes)}, expected at most "
            f"{MAX_UNROLLED_NODES}"
        )
    for node in body.nodes:
        row = operator_of(node)
        where = f"{node.op} {node.name!r}"
        if row is None or node.body is not None:
            raise ModelError(
                f"the body contains {'a loop' if node.body else 'an unsupported operator'}: {where}"
            )
        signature = signature_of(body, node)
        if row.mixes_samples(signature):
            raise ModelError(
                f"the result of {where} in the loop body mixes samples of the batch, which is not "
                "supported"
            )
        if any(signature.present(each) and signature.constant(each) is None for each in row.static):
            raise ModelError(
                f"an operand of {where} that must be constant changes between iterations"
            )
