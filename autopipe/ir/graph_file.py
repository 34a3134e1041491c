"""The file `graph.json` of a plan folder. It contains the planned graph, so that later commands do
not have to read the ONNX file again.

The file contains no weights. A parameter is stored as the location of its data in the model's
files. The data of constants are stored in base64, compressed by zlib. The file is untrusted, so all
of its content is checked when it is read.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final

import numpy as np

from autopipe.ir.codec import AsList, Count, decode, encode, encode_as
from autopipe.ir.errors import ConfigurationError, ModelError
from autopipe.ir.files import JsonRecord, read_json_record
from autopipe.ir.graph import (
    Attribute,
    Constant,
    DType,
    FileSlice,
    Fill,
    Graph,
    Node,
    Parameter,
    Value,
)
from autopipe.ir.ops import OPERATORS, qualified_name, spaces_of
from autopipe.ir.problem import Constraint, Scores
from autopipe.ir.words import plural

GRAPH_FILE: Final = "graph.json"
FORMAT: Final = "autopipe.graph/1"
_PLAN_AGAIN_HINT: Final = "plan again"
_MAX_CONSTANT_BYTES: Final = 1 << 30
"""Maximum bytes of all constants in a file together. The reader of ONNX files has the same limit.
"""
_MAX_LOOP_DEPTH: Final = 64
"""Maximum nesting depth of loops."""
_ATTRIBUTE_INTEGERS: Final = range(-(2**63), 2**64)
"""Range of the integers that an attribute may have."""


@dataclass(frozen=True, slots=True)
class PlannedGraph:
    """The graph of a plan, with properties of the model file that later commands need."""

    graph: Graph
    """The graph for one micro-batch of the step, after the choice whether its losses keep or
    recompute their logits.
    """
    model_digest: str
    """SHA-256 of the ONNX file without its weights and annotations (`Source.digest`)."""
    loss: str
    """Name of the model's output that is the loss; "" if the model has no loss."""
    scores: Scores = "keep"
    """Choice for the losses: "keep" their logits for backward or "recompute" them."""
    constraints: tuple[Constraint, ...] = ()
    """Constraints that the multi-device annotations of the ONNX file impose."""


def write_graph(folder: Path, planned: PlannedGraph) -> None:
    """Write `graph.json` into `folder`."""
    (folder / GRAPH_FILE).write_text(graph_text(planned), encoding="utf-8")


def graph_text(planned: PlannedGraph) -> str:
    """Return the text of `graph.json`, a JSON object. Each node, value, parameter and constant is
    on a separate line.
    """
    form = {
        "format": FORMAT,
        "model_digest": planned.model_digest,
        "loss": planned.loss,
        "scores": planned.scores,
        "constraints": encode_as(planned.constraints, tuple[Constraint, ...]),
        **_graph_json(planned.graph),
    }
    lines = [f"{json.dumps(key)}: {_member_text(value)}" for key, value in form.items()]
    return "{" + ",\n".join(lines) + "}\n"


def _member_text(value: object) -> str:
    """Return a value as JSON text; a list has each item on a separate line."""
    if not isinstance(value, list) or not value:
        return json.dumps(value, allow_nan=False)
    return "[\n " + ",\n ".join(json.dumps(each, allow_nan=False) for each in value) + "]"


def _graph_json(graph: Graph) -> dict[str, Any]:
    """Return a graph as a JSON object."""
    return {
        "name": graph.name,
        "opset": graph.opset,
        "inputs": [_value_json(each) for each in graph.inputs],
        "batch_axes": dict(graph.batch_axes),
        "outputs": list(graph.outputs),
        "parameters": [_parameter_json(each) for each in graph.parameters],
        "constants": [_constant_json(each) for each in graph.constants],
        "nodes": [_node_json(each) for each in graph.nodes],
        "values": [_value_json(each) for each in graph.values],
    }


def _value_json(value: Value) -> list[object]:
    return [value.name, value.dtype.value, list(value.shape)]


def _parameter_json(parameter: Parameter) -> dict[str, Any]:
    form = encode(parameter)
    if isinstance(parameter.storage, Fill) and not math.isfinite(parameter.storage.value):
        form["storage"]["value"] = str(parameter.storage.value)
    return form


def _constant_json(constant: Constant) -> dict[str, object]:
    """Return a constant as a JSON object."""
    form: dict[str, object] = {"value": _value_json(constant.value)}
    dtype = constant.value.dtype
    if constant.array.dtype.newbyteorder("<") != dtype.storage_type:
        # The NumPy type of the array is of the package ml_dtypes, for example bfloat16, and differs
        # from the usual storage type. So its name is stored.
        form["type"] = constant.array.dtype.name
    form["data"] = base64.b64encode(zlib.compress(constant.array.tobytes())).decode()
    return form


def _node_json(node: Node) -> dict[str, object]:
    form: dict[str, object] = {"op": node.op, "name": node.name}
    if node.domain:
        form["domain"] = node.domain
    form["inputs"] = list(node.inputs)
    form["outputs"] = list(node.outputs)
    if node.attributes:
        form["attributes"] = {name: _attribute_json(value) for name, value in node.attributes}
    if node.body is not None:
        form["body"] = _graph_json(node.body)
    return form


def _attribute_json(value: Attribute) -> object:
    """Return an attribute for JSON. An infinity or a NaN, which JSON lacks, becomes an object."""
    if isinstance(value, tuple):
        return [_attribute_json(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return value


def read_graph(path: Path) -> PlannedGraph:
    """Return the graph in the file `path`. Raise ConfigurationError, with file and key, if the file
    cannot be read or is invalid, or if the graph has an operator that autopipe does not support.
    """
    record = read_json_record(path, FORMAT)
    try:
        graph = _read_graph(record, 0)
        planned = PlannedGraph(
            graph=graph,
            model_digest=record.get("model_digest", str),
            loss=record.get("loss", str),
            scores=record.get("scores", Scores),
            constraints=record.get("constraints", tuple[Constraint, ...]),
        )
        _check_operators_of_nodes(graph)
    except ModelError as error:
        what = f"{error.where}: {error.message}" if error.where else error.message
        raise ConfigurationError(
            f"the file describes an invalid graph: {what}", _PLAN_AGAIN_HINT, str(path)
        ) from error
    if planned.loss and not graph.has(planned.loss):
        record.at("loss").reject("the name of a value in the graph")
    return planned


def _read_graph(record: JsonRecord, depth: int) -> Graph:
    """Return the graph that a JSON object represents. `depth` is the number of loops that contain
    it.
    """
    if depth > _MAX_LOOP_DEPTH:
        record.reject(f"a graph with loops nested up to {_MAX_LOOP_DEPTH} deep")
    inputs = tuple(map(_read_value, record.at("inputs").items()))
    ranks = {value.name: len(value.shape) for value in inputs}
    axes = record.at("batch_axes")
    batch_axes = []
    for name, each in axes.members():
        axis = each.value
        if type(axis) is not int or not 0 <= axis < ranks.get(name, 0):
            each.reject("an axis of the input with this name")
        batch_axes.append((name, axis))
    left = [_MAX_CONSTANT_BYTES]
    return Graph(
        name=record.get("name", str),
        opset=record.get("opset", Count),
        inputs=inputs,
        parameters=tuple(map(_read_parameter, record.at("parameters").items())),
        constants=tuple(_read_constant(each, left) for each in record.at("constants").items()),
        nodes=tuple(_read_node(each, depth) for each in record.at("nodes").items()),
        outputs=_read_texts(record.at("outputs")),
        values=tuple(map(_read_value, record.at("values").items())),
        batch_axes=tuple(batch_axes),
    )


_DTYPES: Final[Mapping[str, DType]] = {each.value: each for each in DType}


def _read_value(record: JsonRecord) -> Value:
    """Return the value that a JSON list represents."""
    row = record.value
    if type(row) is list and len(row) == 3:
        name, dtype, shape = row
        is_shape = type(shape) is list and all(type(size) is int and size >= 0 for size in shape)
        if type(name) is str and type(dtype) is str and dtype in _DTYPES and is_shape:
            return Value(name, _DTYPES[dtype], tuple(shape))
    # The fast path above has not accepted the row. `decode` is slower, but raises an error that
    # names the invalid key.
    value: Value = decode(record, Annotated[Value, AsList()])
    return value


def _read_parameter(record: JsonRecord) -> Parameter:
    """Return the parameter that a JSON object represents. Raise ConfigurationError if its data
    would be outside of the model's folder.
    """
    parameter: Parameter = decode(record, Parameter)
    storage = parameter.storage
    if isinstance(storage, FileSlice) and storage.file and not _is_relative_inside(storage.file):
        record.at("storage").at("file").reject("a path inside the model's folder")
    return parameter


def _is_relative_inside(file: str) -> bool:
    """Return True if the path `file` is relative and does not lead out of the folder."""
    path = PurePosixPath(file)
    has_odd_text = "\0" in file or "\\" in file or bool(Path(file).drive)
    return not has_odd_text and not path.is_absolute() and ".." not in path.parts


def _read_constant(record: JsonRecord, left: list[int]) -> Constant:
    """Return the constant that a JSON object represents. The only item of `left` is the number of
    bytes that further constants of the file may have; the size of this constant is subtracted.
    """
    value = _read_value(record.at("value"))
    dtype = value.dtype.storage_type
    if record.has("type"):
        dtype = _ml_dtypes_type(record.at("type"), value.dtype)
    size = value.elements * dtype.itemsize
    left[0] -= size
    if left[0] < 0:
        record.at("value").reject(f"constants of up to {_MAX_CONSTANT_BYTES} bytes in total")
    content = record.at("data")
    text = decode(content, str)
    try:
        # The limit is one byte more than expected, so that data of excessive length are detected
        # without decompressing all of them.
        data = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), size + 1)
    except (ValueError, zlib.error):
        content.reject("data compressed by zlib, in base64")
    if len(data) != size:
        content.reject(f"{size} {plural(size, 'byte')} of data, compressed by zlib")
    return Constant(value, np.ndarray(value.shape, dtype, buffer=data))


def _ml_dtypes_type(record: JsonRecord, dtype: DType) -> np.dtype[Any]:
    """Return the NumPy type of the package ml_dtypes for `dtype`. Raise ConfigurationError if the
    file states another type.
    """
    import ml_dtypes

    if record.value != dtype.value or not hasattr(ml_dtypes, dtype.value):
        record.reject(f"{dtype.value}, the type of the constant")
    found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype.value))
    return found


def _read_node(record: JsonRecord, depth: int) -> Node:
    """Return the node that a JSON object represents. `depth` is the number of loops that contain
    it.
    """
    attributes: tuple[tuple[str, Attribute], ...] = ()
    if record.has("attributes"):
        members = record.at("attributes").members()
        attributes = tuple((name, _read_attribute(each)) for name, each in members)
    return Node(
        name=record.get("name", str),
        op=record.get("op", str),
        inputs=_read_texts(record.at("inputs")),
        outputs=_read_texts(record.at("outputs")),
        attributes=attributes,
        domain=record.get("domain", str) if record.has("domain") else "",
        body=_read_graph(record.at("body"), depth + 1) if record.has("body") else None,
    )


def _read_texts(record: JsonRecord) -> tuple[str, ...]:
    """Return the texts of a JSON list."""
    if type(record.value) is not list or not all(type(each) is str for each in record.value):
        record.reject("a list of texts")
    return tuple(record.value)


def _read_attribute(record: JsonRecord) -> Attribute:
    """Return the attribute that a JSON value represents: a scalar, or a list of values of one
    type.
    """
    if type(record.value) is not list:
        return _read_scalar(record)
    values = tuple(map(_read_scalar, record.items()))
    if len(set(map(type, values))) > 1:
        record.reject("values of one type")
    found: Any = values
    return found  # type: ignore[no-any-return]


def _read_scalar(record: JsonRecord) -> int | float | str:
    """Return a number or text from a JSON value. An infinity or a NaN is an object."""
    value = record.value
    if type(value) is str:
        return value
    if type(value) is int and value in _ATTRIBUTE_INTEGERS:
        return value
    if type(value) is float and math.isfinite(value):
        return value
    if record.has("float") and record.value["float"] in ("inf", "-inf", "nan"):
        return float(record.value["float"])
    raise record.refusal("a number or text")


def _check_operators_of_nodes(graph: Graph) -> None:
    """Raise ModelError if a node of the graph, or of the body of a loop in it, has an unknown
    operator or tensors that do not fit the operator.
    """
    graph.verify()
    space = spaces_of(graph)
    for index, node in enumerate(graph.nodes):
        if node.body is not None:
            _check_operators_of_nodes(node.body)
        if qualified_name(node) not in OPERATORS:
            raise ModelError(f"operator {node.op!r} is unknown", where=repr(node.name))
        try:
            space(index)
        except (ValueError, LookupError, TypeError, AssertionError) as error:
            message = f"the tensors of {node.op} do not fit the operator: {error}"
            raise ModelError(message, where=repr(node.name)) from error
