"""Rules that compute the loss of a step from the losses of its micro-batches, and errors for losses
for which no rule exists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopipe.ir.errors import ConfigurationError, InfeasibleError, ModelError
from autopipe.ir.graph import COUNTED_LABELS, Graph, Node
from autopipe.ir.ops import is_label_loss
from autopipe.ir.problem import AVERAGED_LOSS, LossDivision, Mode
from autopipe.ir.words import plural
from autopipe.passes.analysis.batch_forms import LossForm, LossKind, loss_form
from autopipe.passes.analysis.loss_ratio import Divisor, Ratio, summed_elements, with_total_outputs
from autopipe.passes.batching import Batching
from autopipe.passes.frontend.input_shapes import has_fixed_batch
from autopipe.passes.frontend.loss import may_ignore_labels
from autopipe.passes.frontend.model import Model
from autopipe.passes.frontend.read import mixing_nodes

_DIVISIBLE = (LossKind.MEAN, LossKind.SUM)
"""Kinds of losses for which the losses of the parts of a batch suffice to compute the loss of the
batch.
"""
_SIZES = (2, 4)
"""The two batch sizes for which a model with an open batch size is read. Values that differ between
the two graphs depend on the batch size.
"""
_UNREADABLE = f"the model cannot be read on {' and '.join(map(str, _SIZES))} samples"


def form_of_loss(model: Model, read: Callable[[int], Model]) -> LossForm | None:
    """Return how the loss of `model` depends on the losses of parts of a batch. None if the model
    is not for training, has no loss or has no batch dimension.

    `read` returns the same model for another batch size, also if the model file fixes the batch to
    one sample.
    """
    if model.mode is not Mode.TRAIN or not model.loss or model.batch is None:
        return None
    if model.batch > 1:
        return loss_form(model.graph, model.loss, None, model.batch)
    offered = () if model.source is None else model.source.graph.input
    fixed = model.batch if has_fixed_batch(offered, model.graph.batch_axes) else None
    try:
        first, second = (read(size) for size in _SIZES)
    except (ConfigurationError, ModelError) as error:
        message = error.message if not error.where else f"{error.where}: {error.message}"
        return LossForm(LossKind.UNKNOWN, f"{_UNREADABLE}: {message}", fixed)
    if first.loss != model.loss or second.loss != model.loss:
        shape = (
            list(first.graph.type_of(model.loss).shape)
            if first.graph.has(model.loss)
            else "another one"
        )
        sizes = f"{_SIZES[0]} {plural(_SIZES[0], 'sample')}"
        return LossForm(
            LossKind.MIXED,
            f"on {sizes} the loss {model.loss!r} is no number, its shape is {shape}",
            fixed,
        )
    return loss_form(first.graph, first.loss, second.graph, fixed)


def choose_loss_division(
    form: LossForm | None, model: Model, normalize: str, batching: Batching
) -> LossDivision:
    """Return how the loss of a step is computed from the losses of its micro-batches.

    `form` is the result of `form_of_loss`. `model` is for one micro-batch. `normalize` is the value
    of the key `loss.normalize`: how the user wants losses to be combined. Raises InfeasibleError if
    the losses of micro-batches do not determine the loss of the step and `normalize` does not
    permit an approximation.
    """
    if model.mode is not Mode.TRAIN:
        return AVERAGED_LOSS
    if batching.micro_batches == 1:
        return LossDivision(divisible=form is None or form.kind in _DIVISIBLE)
    if model.graph.has(COUNTED_LABELS):
        # Each micro-batch returns the sum of its losses and its number of labels. The step adds up
        # each of the two, so that its loss is the mean over all labels.
        if (
            form is not None
            and form.kind is not LossKind.SUM
            and form.samples != batching.micro_batch_size
        ):
            raise _indivisible_error(form, model, batching)
        return AVERAGED_LOSS
    exact = not any(
        _depends_on_division(model.graph, node, form) for node in mixing_nodes(model.graph)
    )
    if form is None:
        return LossDivision(1.0 if normalize == "sum" else None, exact)
    if normalize == "sum":
        is_sum = form.kind is LossKind.SUM and form.divisor is None
        return LossDivision(1.0, exact and is_sum, form.kind in _DIVISIBLE)
    if normalize == "micro_batches":
        return LossDivision(None, exact and form.kind is LossKind.MEAN, form.kind in _DIVISIBLE)
    if form.kind is LossKind.MEAN:
        return LossDivision(None, exact)
    if form.kind is LossKind.SUM:
        weight = form.samples / batching.batch_size if form.divisor and form.samples else 1.0
        return LossDivision(weight, exact)
    if form.ratio is not None and form.samples in (None, batching.batch_size):
        return _ratio_division(form.ratio, model, batching, exact)
    if form.samples == batching.micro_batch_size:
        # The file fixes the number of samples per loss to the micro-batch size. The mean of these
        # losses is the closest possible result.
        return LossDivision(None, exact=False, divisible=form.kind is LossKind.UNKNOWN)
    raise _indivisible_error(form, model, batching)


def _ratio_division(ratio: Ratio, model: Model, batching: Batching, exact: bool) -> LossDivision:
    """Return how the loss of a step is computed from the sums N_k and D_k over the samples of each
    micro-batch k. The loss of a batch is h(N / d(D)), where N and D are sums over samples, h is the
    identity or the square root, and d adds a constant or applies a minimum.

    Sums are multiplied by a weight so that the divisor has a magnitude of about 1, and the
    gradients of N have about the magnitude of the gradients of the loss, because float16 cannot
    represent much larger numbers. `exact` is passed on to the result.
    """
    divisor = ratio.divisor or Divisor("")
    counted = summed_elements(model.graph, divisor.total) if ratio.degree == 0 else 1
    weight = 1.0 / (batching.micro_batches * counted)
    if ratio.divisor is None and ratio.degree == 0:
        weight = 1.0
    # If the divisor is a sum over samples, its constant and its minimum are multiplied by the
    # weight of the sum. If the divisor is a mean, the two already refer to a mean and remain
    # unchanged.
    scale = weight if ratio.degree == 0 else 1.0
    minimum = None if divisor.minimum is None else divisor.minimum * scale
    return LossDivision(
        weight,
        exact,
        False,
        model.loss,
        added=divisor.added * scale,
        minimum=minimum,
        root=ratio.root,
    )


def _depends_on_division(graph: Graph, node: Node, form: LossForm | None) -> bool:
    """True if a node that mixes samples gives other results on micro-batches than on the full
    batch. A loss with class weights does not count if the sum of its weights is the divisor of
    `form`, because that divisor is computed for the full batch.
    """
    if not is_label_loss(node):
        return True
    if any(node.inputs[2:3]):
        divisor = None if form is None or form.ratio is None else form.ratio.divisor
        return divisor is None or divisor.total != node.name
    return may_ignore_labels(graph, node)


def with_loss_totals(model: Model, form: LossForm | None, batching: Batching) -> Model:
    """Return the model with additional outputs: the sums over samples from which a loss of kind
    RATIO (a quotient or square root of sums) is computed. Raises InfeasibleError if `form` has no
    ratio or the model's graph does not contain the sums.
    """
    own = other = None
    if form is not None and form.ratio is not None:
        own = with_total_outputs(model.graph, model.loss, form.ratio)
        other = (
            None if model.other is None else with_total_outputs(model.other, model.loss, form.ratio)
        )
    if own is None:
        reason = "its micro-batches are computed in another way than larger ones"
        raise _indivisible_error(LossForm(LossKind.MIXED, reason), model, batching)
    return replace(model, graph=own[0], other=None if other is None else other[0])


def differentiated_value(model: Model, division: LossDivision) -> str:
    """Return the name of the value whose gradient is computed in each micro-batch: the loss of the
    model, or, for a divided loss, its dividend, a sum over samples that `with_loss_totals` adds to
    the outputs.
    """
    if not division.divided:
        return model.loss
    return model.graph.outputs[-2 if model.graph.has(COUNTED_LABELS) else -1]


def batch_size_note(form: LossForm | None, loss: str, batching: Batching) -> str:
    """Return a note for the user on the meaning of the loss if the step has another batch size than
    the file fixes. Return "" if the sizes are equal, if the file fixes no size, if the loss is a
    mean over samples, or if `form` is None.
    """
    if form is None or form.samples is None or form.samples == batching.batch_size:
        return ""
    steps = f"a step of {batching.batch_size} {plural(batching.batch_size, 'sample')}"
    fixed = f"to which the file fixes the batch: {form.samples}"
    if form.kind is LossKind.SUM and form.divisor is not None:
        return (
            f"the loss {loss!r} is a sum divided by {form.divisor}; {steps} averages sums over as "
            f"many, {fixed}"
        )
    if form.kind is LossKind.SUM:
        return (
            f"the loss {loss!r} is a sum over samples; {steps} adds up more samples than those "
            f"{fixed}"
        )
    if form.kind is LossKind.UNKNOWN:
        how = "loss.normalize: micro_batches says that this is right, sum adds them up"
        return (
            f"{form.reason}; the loss of {steps} is the mean of losses of the samples {fixed} "
            f"({how})"
        )
    if form.kind is LossKind.RATIO:
        return (
            f"the loss {loss!r} is {form.ratio_text}; that of {steps} is the mean of losses of the "
            f"samples {fixed}"
        )
    if form.kind is LossKind.MIXED:
        return f"{form.reason}; the loss of {steps} is the mean of losses of the samples {fixed}"
    return ""


def _indivisible_error(form: LossForm, model: Model, batching: Batching) -> InfeasibleError:
    """Return the error for a loss that cannot be computed from the losses of micro-batches, with a
    hint.
    """
    if form.kind is LossKind.UNKNOWN:
        return InfeasibleError(
            f"the loss {model.loss!r} of a batch of {batching.batch_size} "
            f"{plural(batching.batch_size, 'sample')} cannot be computed from the losses of "
            f"{batching.micro_batches} {plural(batching.micro_batches, 'micro-batch')}: "
            f"{form.reason}",
            hint=(
                "set loss.normalize to micro_batches if the loss is a mean over samples, or to "
                "sum if the loss is a sum over samples"
            ),
        )
    message = (
        f"the losses of {batching.micro_batches} {plural(batching.micro_batches, 'micro-batch')} "
        f"do not give the loss {model.loss!r} of a batch of "
        f"{batching.batch_size} {plural(batching.batch_size, 'sample')}: "
        f"{form.reason or form.ratio_text}"
    )
    whole = "--micro-batches 1"
    if form.samples is not None:
        whole = f"--micro-batch-size {form.samples}, for which the file was exported"
    hint = (
        f"{whole}; or loss.normalize: micro_batches, to train on the mean of the losses of "
        "micro-batches"
    )
    return InfeasibleError(message, hint)
