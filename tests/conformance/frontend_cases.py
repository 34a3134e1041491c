"""ONNX's own cases as files that a user passes to the frontend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.backend.test.case.test_case import TestCase

from autopipe.ir.ops import OPERATORS
from autopipe.passes.frontend.load import OLDEST_OPSET
from autopipe.passes.frontend.protobuf_scan import CONTROL_OPERATORS
from autopipe.passes.frontend.read import read_model
from autopipe.passes.frontend.sequences import SEQUENCE_OPERATORS
from tests.conformance.cases import (
    all_cases,
    data_of,
    model_of,
    resolved,
    skips,
    unread,
)
from tests.passes.frontend.evaluated import emitted


def _opset(case: TestCase) -> int:
    return max(
        each.version for each in model_of(case).opset_import if each.domain in ("", "ai.onnx")
    )


def _versioned(case: TestCase) -> bool:
    return any(each.domain in ("", "ai.onnx") for each in model_of(case).opset_import)


READ = [
    (kind, name)
    for (kind, name), case in all_cases().items()
    if name not in skips().keys() - resolved() and name not in unread()
    if _versioned(case) and _opset(case) >= OLDEST_OPSET
]
"""(Collection, name) of each case that the frontend reads."""


def results_through_frontend(
    case: TestCase, folder: Path
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return (the results of the emitted program, the expected results) for the first data set of a
    case. The frontend reads the case from a file in `folder`.
    """
    path = folder / f"{case.name}.onnx"
    inputs, expected = next(data_of(case))
    model, given = _of_tensors(model_of(case), inputs)
    held = {each.name for each in model.graph.initializer}
    onnx.save(with_known_inputs(model, given), path)
    read = read_model(path, batch_axes=dict.fromkeys(data_inputs(path, held)))
    tensors = [part for each in expected for part in (each if isinstance(each, list) else [each])]
    return [*emitted(read, given).values()], tensors


def _of_tensors(
    model: onnx.ModelProto, inputs: list[Any]
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Return (the model with tensors as inputs, these tensors by name). Nodes that are added to the
    model make its sequences and Optionals of the tensors.
    """
    found = onnx.ModelProto()
    found.CopyFrom(model)
    held = {each.name for each in model.graph.initializer}
    infos = [each for each in model.graph.input if each.name not in held]
    given: dict[str, np.ndarray] = {}
    for info, value in zip(infos, inputs, strict=False):
        if info.type.HasField("tensor_type"):
            given[info.name] = value
            continue
        parts = [
            each for each in (value if isinstance(value, list) else [value]) if each is not None
        ]
        named = {f"{info.name} {place}": each for place, each in enumerate(parts)}
        operator = (
            ("SequenceConstruct" if named else "SequenceEmpty")
            if isinstance(value, list)
            else "Optional"
        )
        found.graph.node.insert(0, helper.make_node(operator, list(named), [info.name]))
        given |= named
    del found.graph.input[:]
    for name, array in given.items():
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        found.graph.input.append(helper.make_tensor_value_info(name, kind, array.shape))
    return found, given


def with_known_inputs(model: onnx.ModelProto, given: dict[str, np.ndarray]) -> onnx.ModelProto:
    """Return the model with initializers in place of the inputs that determine shapes, as in a
    user's file.
    """
    found = onnx.ModelProto()
    found.CopyFrom(model)
    known = {
        name
        for node in found.graph.node
        if node.op_type in OPERATORS.keys() | SEQUENCE_OPERATORS
        for slot, name in enumerate(node.input)
        if name in given and _determines_shapes(node, slot, given[name])
    }
    if any(node.op_type in CONTROL_OPERATORS for node in found.graph.node):
        known |= {name for name, array in given.items() if array.shape == ()}
    for name in sorted(known):
        found.graph.initializer.append(numpy_helper.from_array(np.asarray(given[name]), name))
    kept = [each for each in found.graph.input if each.name not in known]
    del found.graph.input[:]
    found.graph.input.extend(kept)
    return found


def _determines_shapes(node: onnx.NodeProto, slot: int, array: np.ndarray) -> bool:
    """True if an operator requires a constant operand, or if shapes of later nodes may depend on
    the operand.
    """
    static = OPERATORS[node.op_type].static if node.op_type in OPERATORS else ()
    return slot in static or (array.dtype == np.int64 and node.op_type not in _INDEXED)


_INDEXED = frozenset(
    {"Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND", "Scatter", "OneHot"}
)
"""Operators whose integers are data."""


def data_inputs(path: Path, held: set[str]) -> list[str]:
    """Return the names of a file's inputs that are not in `held`."""
    return [each.name for each in onnx.load(path).graph.input if each.name not in held]
