"""The order of the frontend's steps."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import Graph
from autopipe.ir.ops import OPERATORS, qualified_name
from autopipe.passes.frontend.clean import cleaned
from autopipe.passes.frontend.dimensions import bind_inputs
from autopipe.passes.frontend.interpret import interpret
from autopipe.passes.frontend.load import Source, load, located
from autopipe.passes.frontend.model import Model, Unsupported
from autopipe.passes.frontend.parameters import roles_of
from autopipe.passes.frontend.weights import Weights


def read_model(
    path: Path,
    *,
    dims: Mapping[str, int] | None = None,
    batch: int | None = None,
    batch_axes: Mapping[str, int | None] | None = None,
    frozen: tuple[str, ...] = (),
) -> Model:
    """The graph of one evaluation of the model in `path`, on `batch` samples.

    `dims` binds symbolic dimensions by name. `batch_axes` says which axis of an input counts samples where it is not
    axis 0 (None: no axis does). Parameters whose names match a pattern of `frozen` are not trained. Raises ModelError,
    naming file and node, for what cannot be read, and ConfigurationError for dimensions that do not fit.
    """
    model = survey_model(path, dims=dims, batch=batch, batch_axes=batch_axes, frozen=frozen)
    if model.unsupported:
        raise ModelError(
            "operators that are not supported: "
            + ", ".join(f"{each.operator} ({each.count})" for each in model.unsupported),
            hint=_nearest_hint(model.unsupported),
            where=f"{path}: {model.unsupported[0].node!r}",
        )
    return model


def survey_model(
    path: Path,
    *,
    dims: Mapping[str, int] | None = None,
    batch: int | None = None,
    batch_axes: Mapping[str, int | None] | None = None,
    frozen: tuple[str, ...] = (),
) -> Model:
    """As `read_model`, but operators without a row are listed in the result rather than refused."""
    source = load(path)
    try:
        return _survey(source, dims or {}, batch, batch_axes or {}, frozen)
    except ModelError as error:
        raise located(error, source.path) from error


def _survey(
    source: Source,
    dims: Mapping[str, int],
    batch: int | None,
    batch_axes: Mapping[str, int | None],
    frozen: tuple[str, ...],
) -> Model:
    initializers = {tensor.name for tensor in source.graph.initializer}
    data = tuple(info for info in source.graph.input if info.name not in initializers)
    inputs = bind_inputs(data, dims, batch, batch_axes)
    weights = Weights.of(source, roles_of(source.nodes, source.metadata, frozen))
    graph = cleaned(interpret(source, inputs, weights))
    graph.verify()
    return Model(
        graph=graph,
        path=source.path,
        digest=source.digest,
        batch=inputs.batch,
        loss=_loss_output(graph),
        nodes_before=len(source.nodes),
        unsupported=unsupported_operators(graph),
        warnings=(*source.warnings, *_absent_warning(weights)),
    )


def _loss_output(graph: Graph) -> str:
    """The output called `loss`, where it is a floating-point scalar."""
    for name in graph.outputs:
        value = graph.type_of(name)
        if name == "loss" and value.dtype.is_floating and value.elements == 1:
            return name
    return ""


def _absent_warning(weights: Weights) -> tuple[str, ...]:
    names = weights.absent
    if not names:
        return ()
    return (f"{len(names)} parameters have no numbers in the file and are drawn at random, {names[0]!r} first",)


def unsupported_operators(graph: Graph) -> tuple[Unsupported, ...]:
    """The operators without a row, most frequent first."""
    counts = Counter(qualified_name(node) for node in graph.nodes)
    first = {qualified_name(node): node.name for node in reversed(graph.nodes)}
    return tuple(
        Unsupported(name, count, first[name], next(iter(difflib.get_close_matches(name, OPERATORS, n=1)), ""))
        for name, count in counts.most_common()
        if name not in OPERATORS
    )


def _nearest_hint(unsupported: tuple[Unsupported, ...]) -> str:
    known = [f"{each.nearest} is supported" for each in unsupported if each.nearest]
    return "; ".join(known)
