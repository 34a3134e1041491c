"""Reading of a request's model with the numbers of samples that planning needs."""

from __future__ import annotations

from dataclasses import replace

from autopipe.ir.errors import CANDIDATE_ERRORS, ConfigurationError
from autopipe.ir.graph import Graph
from autopipe.ir.problem import Mode
from autopipe.passes.analysis.joined_samples import first_joining_node
from autopipe.passes.batching import batchings
from autopipe.passes.frontend import Model, Source, read_model
from autopipe.passes.frontend.input_shapes import has_fixed_batch
from autopipe.passes.frontend.model import require_trainable
from autopipe.passes.pipeline.request import Request
from autopipe.passes.pipeline.runner import Runner


def read_request_model_uncached(
    request: Request,
    micro_batch_size: int | None,
    source: Source | None = None,
    opened: bool = False,
) -> Model:
    """Return the model read with `micro_batch_size` samples per forward pass. If it is None, use
    the number of samples that the file fixes, or one sample if it fixes none.

    `source` is the parsed file if it is available. `opened` is passed to `read_model`. Raise the
    errors of `read_model`, and ModelError if training would update a tensor that an exporter
    computed from parameters, instead of these parameters.
    """
    model = read_model(
        source or request.model,
        dims=dict(request.dims),
        batch=micro_batch_size,
        batch_axes=dict(request.batch_axes),
        fixed_inputs=dict(request.fixed_inputs),
        loss=request.loss,
        normalize=request.normalize,
        scores=request.scores,
        mode=request.mode,
        training=request.training_graph,
        frozen=request.frozen,
        trainable=request.trainable,
        opened=opened,
    )
    require_trainable(model)
    return model


def read_request_model(
    request: Request, runner: Runner, size: int | None = None, source: Source | None = None
) -> Model:
    """Return the model as `read_request_model_uncached` does with `size` samples, with the
    requested form of the losses (saved or recomputed logits).

    `runner` caches the model, so it is read once per number of samples for both forms.
    """
    if size not in runner.models:
        runner.models[size] = runner.run(
            "read", lambda: read_request_model_uncached(request, size, source)
        )
    model = runner.models[size]
    return model.with_scores(request.scores or model.scores)


_FOLLOWED = 3
"""Minimum number of samples with which a model is read again if it was read with one sample,
because the batch axis of one sample cannot be followed through the graph.
"""


def use_whole_batch(request: Request, runner: Runner) -> Request:
    """Return the request with one micro-batch per batch if inference computes an output from
    several samples. Otherwise return the given request.

    The batch is the batch that the file fixes, otherwise the batch of the step. Raise
    ConfigurationError if the request asks for smaller micro-batches.
    """
    model = read_request_model(request, runner)
    if model.mode is Mode.TRAIN or model.batch is None or request.micro_batches == 1:
        return request
    node = first_joining_node(
        model.graph if model.batch > 1 else graph_on_several_samples(request, runner, model)
    )
    if node is None:
        return request
    fixed = model.batch if model.batch > 1 else None
    size = request.micro_batch_size
    count = request.micro_batches
    batch = (
        request.batch_size
        or fixed
        or next(batchings(None, None, None, None, request.cluster.size)).batch_size
    )
    if size == (fixed or batch):
        return request
    if size is not None or (count is not None and (fixed is None or batch // count != fixed)):
        raise ConfigurationError(
            (
                f"{node.op} {node.name!r} computes an output from several samples, so "
                "micro-batches would change the output"
            ),
            hint="set --micro-batches 1" if fixed is None else f"set --micro-batch-size {fixed}",
        )
    return replace(request, batch_size=batch, micro_batch_size=fixed or batch)


def graph_on_several_samples(
    request: Request, runner: Runner, model: Model, times: int = 1
) -> Graph:
    """Return the graph of the model read with several samples per forward pass: `times` the
    micro-batch size of the request, or `times` `_FOLLOWED` if that is larger.

    If the model cannot be read with this number, return the graph of `model`.
    """
    size = times * max(request.micro_batch_size or 1, _FOLLOWED)
    try:
        return _read_cached_model(request, runner, size, model.source).graph
    except CANDIDATE_ERRORS:
        return model.graph


def read_resized_model(request: Request, runner: Runner, first: Model, size: int) -> Model:
    """Return the model read with `size` samples, even if its file fixes another batch size. `first`
    is the model read with the number of samples that the file fixes, or with one sample.
    """
    offered = () if first.source is None else first.source.graph.input
    if has_fixed_batch(offered, first.graph.batch_axes):
        return read_request_model_uncached(request, size, first.source, opened=True)
    model = _read_cached_model(request, runner, size, first.source)
    return model.with_scores(request.scores or model.scores)


def _read_cached_model(request: Request, runner: Runner, size: int, source: Source | None) -> Model:
    """Return the model read with `size` samples, from the cache of `runner` if it is there. The
    time of reading counts for the pass that calls this function.
    """
    if size not in runner.models:
        runner.models[size] = read_request_model_uncached(request, size, source)
    return runner.models[size]
