"""The steps that turn an ONNX file into a `Model`, in their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from autopipe.ir.batch import batch_axes_of, resize_batch
from autopipe.ir.errors import AutopipeError, ModelError
from autopipe.ir.graph import Fill, Graph, Node
from autopipe.ir.ops import is_label_loss, operator_of, signature_of, spaces_of
from autopipe.ir.problem import Mode, Scores, wanted_outputs
from autopipe.ir.words import plural
from autopipe.passes.frontend.batch_inputs import infer_batch_axes
from autopipe.passes.frontend.cleanup import (
    clean_graph,
    convert_to_inference,
    remove_idle_stops,
    remove_unread,
    replace_broadcast_gathers,
)
from autopipe.passes.frontend.elements import DTYPES
from autopipe.passes.frontend.fusion.cross_entropy import fuse_linear_losses, has_large_loss
from autopipe.passes.frontend.fusion.rules import fuse_operators
from autopipe.passes.frontend.inference import MisfitError
from autopipe.passes.frontend.input_shapes import (
    Inputs,
    bind_inputs,
    dimensions_of,
    filled_inputs,
    sizes_by_symbol,
    split_range_bounds,
)
from autopipe.passes.frontend.interpret import interpret
from autopipe.passes.frontend.load import Source, add_path_to_error, load
from autopipe.passes.frontend.loss import (
    CrossEntropy,
    add_cross_entropy,
    find_only_loss,
    loss_choices,
    may_ignore_labels,
    require_loss,
)
from autopipe.passes.frontend.model import (
    Model,
    freeze_refused,
    freeze_unreached,
    is_refused,
    list_tensors,
    require_readable,
    stopped_parameters,
    training_warnings,
    unsupported_error,
    unsupported_operators,
    values_before_stops,
)
from autopipe.passes.frontend.parameters import TrainingChoice, roles_of
from autopipe.passes.frontend.token_loss import sum_loss_over_labels
from autopipe.passes.frontend.weights import Weights


def read_model(
    file: Path | Source,
    *,
    dims: Mapping[str, int] | None = None,
    batch: int | None = None,
    batch_axes: Mapping[str, int | None] | None = None,
    fixed_inputs: Mapping[str, bool | int | float] | None = None,
    loss: str | CrossEntropy | None = None,
    normalize: str = "micro_batches",
    mode: Mode | None = None,
    training: bool | None = None,
    frozen: tuple[str, ...] = (),
    trainable: tuple[str, ...] = (),
    with_unsupported: bool = False,
    scores: Scores | None = None,
    opened: bool = False,
) -> Model:
    """Read the model in `file`, a path or the `Model.source` of a model that was read before, and
    return it with the graph of one forward pass on `batch` samples.

    - `dims`: sizes of symbolic dimensions, by name or INPUT:AXIS. For RESULT:0 of a Range, the size
      is the maximum length if the length depends on data.
    - `batch`: defaults to the batch size that the file or `dims` fixes, otherwise 1.
    - `batch_axes`: the batch dimension of an input if it is not axis 0; None if the input has none.
    - `fixed_inputs`: inputs that are replaced by a constant number.
    - `loss`: name of an output, or a loss to add. By default, the loss is the output that can be a
      loss if there is only one; if there are several, `Model.loss_choices` lists them.
    - `normalize`: the option `loss.normalize`.
    - `mode`: defaults to training if there is a loss, otherwise to inference.
    - `training`: defaults to True in training mode. If False, dropout is disabled and
      BatchNormalization uses its running statistics.
    - `frozen` and `trainable`: patterns of tensor names (globs, or regular expressions after
      `re:`). Parameters that match `frozen` are not trained. Floating-point tensors that match
      `trainable` are trained regardless of other evidence, except running statistics.
    - `with_unsupported`: if True, unsupported operators are listed in the result instead of raising
      an error.
    - `scores`: whether the loss saves its logits for the backward pass (`keep`) or recomputes them
      (`recompute`). None leaves the choice to the plan: the model saves them, and `Model.other` is
      the graph that recomputes them if that is considered.
    - `opened`: if True, the model is read on `batch` samples even if its file fixes the batch to
      one sample.

    Raises ModelError, naming file and node, if the file cannot be read. Raises ConfigurationError
    for dimensions, batch sizes and losses that do not fit.
    """
    source = file if isinstance(file, Source) else load(Path(file))
    losses = loss, normalize, scores

    def read(samples: int | None) -> Model:
        """Read the model on `samples` samples; None stands for the default batch size."""
        asked = dims or {}, samples, batch_axes or {}, fixed_inputs or {}
        return _read(
            source, asked, losses, mode, training, TrainingChoice(trainable, frozen), opened
        )

    try:
        if source is not file:
            require_readable(source)
        try:
            model = read(batch)
        except MisfitError as error:
            raise (
                error if batch is not None else _suggest_batch_size(source, error, read)
            ) from error
        if model.unsupported and not with_unsupported:
            raise unsupported_error(model.unsupported)
    except ModelError as error:
        raise add_path_to_error(error, source.path) from error
    return model


_MORE_SAMPLES = (2, 16, 128)
"""Batch sizes that are tried in this order if a model cannot be read on one sample."""


def _suggest_batch_size(
    source: Source, error: ModelError, read: Callable[[int], Model]
) -> ModelError:
    """Return the error to raise for a model that cannot be read on one sample. If the batch
    dimension is symbolic and `read` can read a larger batch, the error tells the size of that
    batch; otherwise return `error`.
    """
    for samples in _MORE_SAMPLES:
        try:
            model = read(samples)
        except AutopipeError:
            continue
        shapes = {info.name: dimensions_of(info) for info in source.graph.input}
        names = [
            shapes[name][axis]
            for name, axis in model.graph.batch_axes
            if isinstance(shapes[name][axis], str)
        ]
        if model.batch == samples and names:
            message = (
                f"the model can be read for the batch size {samples}, but not for the batch "
                f"size 1: {error.where}: {error.message}"
            )
            return ModelError(
                message,
                f"set the number of samples per micro-batch with --dim {names[0]}={samples}",
            )
    return error


def _read(
    source: Source,
    asked: tuple[
        Mapping[str, int], int | None, Mapping[str, int | None], Mapping[str, bool | int | float]
    ],
    losses: tuple[str | CrossEntropy | None, str, Scores | None],
    mode: Mode | None,
    training: bool | None,
    chosen: TrainingChoice,
    opened: bool,
) -> Model:
    """Read the graph of a parsed file and infer what a `Model` contains.

    - `asked`: (dims, batch, batch_axes, fixed_inputs) of `read_model`.
    - `losses`: (loss, normalize, scores) of `read_model`.
    - `chosen`: patterns of trained and frozen tensors.
    """
    (dims, batch, batch_axes, fixed) = asked
    (loss, normalize, scores) = losses
    bounds, dims = split_range_bounds(source.nodes, dims)
    initializers = {tensor.name for tensor in source.graph.initializer}
    offered = {info.name: info for info in source.graph.input if info.name not in initializers}
    numbers = filled_inputs(offered, fixed)
    data = tuple(info for name, info in offered.items() if name not in fixed)
    dims = sizes_by_symbol(data, dims, batch_axes)
    roles = roles_of(source)

    def followed(tried: Inputs) -> Graph:
        """Return the graph for the inputs `tried`, through which `infer_batch_axes` traces batch
        axes.
        """
        return replace_broadcast_gathers(
            interpret(source, tried, Weights(source, roles, chosen), numbers, bounds)[0]
        )

    declared = infer_batch_axes(data, dims, batch_axes, followed)
    inputs = bind_inputs(data, dims, batch, declared, opened)
    weights = Weights(source, roles, chosen)
    interpreted, aliases = interpret(source, inputs, weights, numbers, bounds)
    chosen.require_matched()
    read = remove_idle_stops(remove_unread(interpreted))
    graph, scalar = _simplify(read, loss)
    mode = mode or (Mode.TRAIN if scalar else Mode.INFER)
    if mode is Mode.INFER and (plain := remove_idle_stops(read, trains=False)) is not read:
        read = plain
        graph, scalar = _simplify(read, loss)
    evaluates = mode is Mode.INFER if training is None else not training
    if evaluates and (inferring := convert_to_inference(read)) is not read:
        graph, scalar = _simplify(inferring, loss)
    by_label = mode is Mode.TRAIN and bool(scalar) and normalize == "tokens"
    if by_label:
        graph, scalar = sum_loss_over_labels(graph, scalar)
    if batch is not None and inputs.batch is not None:
        graph = resize_batch(graph, batch)
    stopped: dict[str, tuple[str, ...]] = {}
    behind = values_before_stops(graph)
    # A refused tensor was computed from parameters in a way that the file does not state. Before a
    # StopGradient it receives no gradient, but training would change these parameters and so
    # invalidate the tensor.
    stale = {
        name
        for each in graph.parameters
        if (name := each.value.name) in behind and is_refused(each, weights.found)
    }
    if mode is Mode.TRAIN and scalar:
        stopped = stopped_parameters(graph, scalar)
        graph = freeze_unreached(graph, scalar)
    refused = (
        frozenset(each.value.name for each in graph.parameters if is_refused(each, weights.found))
        | stale
    )
    graph = freeze_refused(graph, weights.found)
    recomputing = fuse_linear_losses(graph, wanted_outputs(graph, mode, scalar))
    other = (
        None
        if recomputing is graph or (scores is None and not has_large_loss(recomputing))
        else recomputing
    )
    for each in (graph, other):
        if each is not None:
            each.verify()
            _verify_operands(each)
    trains = mode is Mode.TRAIN and bool(scalar)
    tensors = list_tensors(graph, weights.found, refused if trains else frozenset())
    left_out = (
        roles.signature.omitted_parameters(source.graph)
        if roles.signature and mode is Mode.TRAIN
        else []
    )
    model = Model(
        graph=graph,
        other=other,
        path=source.path,
        digest=source.digest,
        batch=inputs.batch if batch is None or inputs.batch is None else batch,
        loss=scalar,
        loss_choices=() if scalar else loss_choices(graph),
        mode=mode,
        nodes_before=len(source.nodes),
        configurations=source.configurations,
        unsupported=unsupported_operators(graph),
        warnings=(
            *source.warnings,
            *weights.warnings(),
            *_output_type_warnings(source, interpreted),
            *_mixing_warnings(
                graph,
                mixing_nodes(graph) if mode is Mode.TRAIN else nodes_reading_batch_results(graph),
                by_label,
            ),
            *(
                training_warnings(tensors, source.apart, left_out, stopped)
                if mode is Mode.TRAIN
                else ()
            ),
        ),
        source=source,
        aliases=aliases,
        tensors=tensors,
        unknown_detached=weights.unknown_detached,
        unrecorded=roles.unrecorded,
    )
    return model.with_scores(scores or "keep")


def _output_type_warnings(source: Source, graph: Graph) -> tuple[str, ...]:
    """Return a warning if the types of outputs of `graph` differ from the types that the file
    declares; () if they agree. Symbolic dimensions are not compared.
    """
    found = []
    for info in source.graph.output:
        tensor = info.type.tensor_type
        if (
            not graph.has(info.name)
            or not info.type.HasField("tensor_type")
            or not tensor.elem_type
        ):
            continue
        value = graph.type_of(info.name)
        stated = [each.dim_value if each.dim_value > 0 else None for each in tensor.shape.dim]
        shape = value.shape if not tensor.HasField("shape") else stated
        is_equal = len(shape) == len(value.shape) and all(
            extent in (None, own) for extent, own in zip(shape, value.shape, strict=True)
        )
        if not is_equal or DTYPES.get(tensor.elem_type) is not value.dtype:
            words = ", ".join("?" if extent is None else str(extent) for extent in shape)
            kind = (
                DTYPES[tensor.elem_type].value
                if tensor.elem_type in DTYPES
                else f"type {tensor.elem_type}"
            )
            own = ", ".join(map(str, value.shape))
            found.append(
                f"{info.name!r} is {value.dtype.value}[{own}], the file states {kind}[{words}]"
            )
    more = (
        (
            f", and {len(found) - 1} more {plural(len(found) - 1, 'output is', 'outputs are')} not "
            "as stated"
        )
        if len(found) > 1
        else ""
    )
    return (f"output {found[0]}{more}",) if found else ()


def _verify_operands(graph: Graph) -> None:
    """Raise ModelError if the operands or results of a node do not fit its operator."""
    space = spaces_of(graph)
    for index, node in enumerate(graph.nodes):
        if operator_of(node) is not None:
            space(index)


def _simplify(read: Graph, loss: str | CrossEntropy | None) -> tuple[Graph, str]:
    """Return (graph after cleanup and fusion, with its loss; name of the loss, "" if there is
    none).
    """
    graph = fuse_operators(clean_graph(read))
    lost = set(read.parameters) ^ set(graph.parameters)
    # Fusion of experts may remove untrained tensors of zeros. Any other change of the parameters is
    # an internal error, not an error of the file.
    lost = {each for each in lost if each.trainable or not isinstance(each.storage, Fill)}
    if lost:
        raise ModelError(
            "internal error: cleaning the graph changed the parameters, first "
            f"{min(each.value.name for each in lost)!r}"
        )
    if isinstance(loss, CrossEntropy):
        return add_cross_entropy(graph, loss)
    scalar = find_only_loss(graph) if loss is None else loss
    if scalar:
        require_loss(graph, scalar)
    return graph, scalar


def mixing_nodes(graph: Graph) -> tuple[Node, ...]:
    """Return the nodes whose result for one sample depends on other samples, so that splitting the
    batch into micro-batches changes results. There are three kinds:

    - operators that mix samples by definition, for example batch statistics and means over labels
      that are not ignored;
    - products of two batches, for example the logits of a contrastive loss;
    - nodes that combine samples with a value of the full batch, for example the condition of an If.
    """
    axes = batch_axes_of(graph)
    beside = {node.name for node in nodes_reading_batch_results(graph)}
    found = []
    for node, samples in zip(graph.nodes, axes.nodes, strict=True):
        operator = operator_of(node)
        together = max((len(axes.values.get(name, ())) for name in node.inputs), default=0)
        meets = len({each.axis for each in samples}) > max(together, 1) or node.name in beside
        if meets or (operator is not None and operator.mixes_samples(signature_of(graph, node))):
            found.append(node)
    return tuple(found)


def nodes_reading_batch_results(graph: Graph) -> tuple[Node, ...]:
    """Return the nodes that read both samples and a value without batch dimension that is computed
    from all samples of the batch.
    """
    axes = batch_axes_of(graph)
    found = []
    fed = {each.name for each in graph.inputs}
    joined = set[str]()
    for node, samples in zip(graph.nodes, axes.nodes, strict=True):
        is_joined = not joined.isdisjoint(node.inputs)
        is_fed = not fed.isdisjoint(node.inputs)
        if is_joined and any(name in axes.values and name in fed for name in node.inputs):
            found.append(node)
        if is_fed:
            fed.update(node.outputs)
        if is_joined or (samples and is_fed):
            joined.update(name for name in node.outputs if name and name not in axes.values)
    return tuple(found)


def _mixing_warnings(graph: Graph, mixing: tuple[Node, ...], by_label: bool) -> tuple[str, ...]:
    """Return warnings about the nodes `mixing`, which mix samples.

    If `by_label` is True, there is no warning about losses: labels are counted over the full step.
    There is none about losses with class weights either: micro-batches either accumulate losses and
    weights separately, or are rejected.
    """
    others = [node for node in mixing if not is_label_loss(node)]
    losses = [node for node in mixing if is_label_loss(node) and not any(node.inputs[2:3])]
    losses = [node for node in losses if not by_label and may_ignore_labels(graph, node)]
    found = []
    for nodes, what in (
        (
            others,
            "mixes the samples of a batch: micro-batches change what is computed, larger ones "
            "change less (--micro-batch-size)",
        ),
        (
            losses,
            "averages over the labels that are not left out of each micro-batch: "
            "loss.normalize: tokens averages over "
            "the whole step's",
        ),
    ):
        if nodes:
            more = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
            found.append(f"{nodes[0].op} {nodes[0].name!r}{more} {what}")
    return tuple(found)
