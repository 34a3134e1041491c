"""The part of a serialised model that decides what it computes: a copy with other annotations, or with none, is the
same model.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopipe.passes.frontend.wire import (
    GRAPH_NODE,
    LENGTH,
    MODEL_CONFIGURATION,
    MODEL_GRAPH,
    MODEL_IR_VERSION,
    NODE_CONFIGURATION,
    Field,
    fields_of,
    header,
)

Piece = bytes | memoryview


def unannotated(data: memoryview) -> Iterator[Piece]:
    """The model's bytes, piece by piece, without annotations and the version of the format, which they raise."""
    fields = list(fields_of(data, 0, len(data)))
    annotated = any(field.number == MODEL_CONFIGURATION for field in fields)
    for field in fields:
        if annotated and field.number == MODEL_GRAPH and field.wire == LENGTH:
            pieces = list(_graph(data, field))
            yield header(MODEL_GRAPH, sum(map(len, pieces)))
            yield from pieces
        elif field.number not in (MODEL_IR_VERSION, MODEL_CONFIGURATION):
            yield data[field.start : field.end]


def _graph(data: memoryview, graph: Field) -> Iterator[Piece]:
    """Contents of the graph's field."""
    for part in fields_of(data, graph.payload, graph.end):
        if part.number != GRAPH_NODE or part.wire != LENGTH:
            yield data[part.start : part.end]
            continue
        kept = [field for field in fields_of(data, part.payload, part.end) if field.number != NODE_CONFIGURATION]
        yield header(GRAPH_NODE, sum(field.end - field.start for field in kept))
        yield from (data[field.start : field.end] for field in kept)
