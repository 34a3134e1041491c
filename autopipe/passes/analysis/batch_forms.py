"""Analysis of how the loss of a batch depends on the losses of its parts: whether the losses of
micro-batches are averaged, summed, or neither.

Let A and B be batches, A + B their concatenation, and v(A) a value of the graph for batch A. Each
value has one of these forms:

    FIXED    depends on no sample                            a parameter
    UNIFORM  has one entry per sample; all are equal         a mask of ones
    EACH     has one entry per sample, computed from it      an activation
    TOTAL    v(A + B) = v(A) + v(B)                          a sum over samples
    BOUNDED  a TOTAL plus a constant, or the maximum of      a count of at least 1
             a TOTAL and a constant
    RATIO    a TOTAL divided by a TOTAL or a BOUNDED         a mean over counted labels
    ROOT     the square root of a TOTAL or of a RATIO        a norm
    MIXED    none of these                                   a maximum over samples

The forms FIXED, UNIFORM, EACH and TOTAL have a degree d: the value is n^d times a value of that
form, where n is the number of samples. A mean over samples is a TOTAL of degree -1. The number of
samples is FIXED of degree 1. The forms follow from the iteration spaces of the nodes
(`ir/space.py`): a sum over the sample axis turns an EACH into a TOTAL, and an operator that cannot
split this axis makes the result MIXED. The degree of a constant that is computed from the number of
samples is found by comparing the graphs for two numbers of samples.

BatchNormalization with batch statistics, and means over labels of which some are ignored, are
treated as if they kept samples separate. This is accepted practice, and the frontend warns about
it.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopipe.ir.batch import BatchAxes, batch_axes_of
from autopipe.ir.graph import Constant, Graph, Node
from autopipe.ir.ops import is_label_loss, operator_of, operators_with, signature_of, spaces_of
from autopipe.ir.ops.normalization import loss_reduction, uses_batch_statistics
from autopipe.ir.ops.operator import Operator
from autopipe.ir.space import AxisKind
from autopipe.passes.analysis.gradients import differentiable_values
from autopipe.passes.analysis.loss_ratio import Divisor, Ratio


class LossKind(enum.Enum):
    """Rule by which the losses of equal parts of a batch determine the loss of the batch."""

    MEAN = "mean"
    SUM = "sum"
    MIXED = "mixed"
    """The losses of the parts do not determine the loss of the batch."""
    RATIO = "ratio"
    """The loss is computed from sums over samples (`Ratio`). Each of these sums is added up over
    the parts, and the loss of the batch is computed from the results.
    """
    UNKNOWN = "unknown"
    """The graph is not sufficient to determine the kind."""


@dataclass(frozen=True, slots=True)
class LossForm:
    """The kind of a loss, as `loss_form` and `form_of_loss` determine it. For a MIXED loss,
    `reason` is why the losses of the parts do not determine the loss of the batch. For an UNKNOWN
    loss, `reason` is why the kind could not be determined. For other losses, `reason` is "".
    """

    kind: LossKind
    reason: str = ""
    samples: int | None = None
    """Batch size that the model file fixes; None if the file leaves the batch size open."""
    divisor: int | None = None
    """For a sum over samples that is divided by a constant: this constant, which is a multiple of
    `samples`. Otherwise None.
    """
    ratio: Ratio | None = None
    """The sums over samples from which a loss of kind RATIO (a quotient or square root of sums) is
    computed; None for other kinds.
    """

    def __str__(self) -> str:
        if self.kind is LossKind.MEAN:
            return "a mean over samples: the losses of micro-batches are averaged"
        if self.kind is LossKind.MIXED:
            return f"not divisible into micro-batches: {self.reason}"
        if self.kind is LossKind.RATIO:
            return f"{self.ratio_text}: micro-batches add up what it is computed from"
        if self.kind is LossKind.UNKNOWN:
            return f"not known to be divisible into micro-batches: {self.reason}"
        if self.divisor is not None:
            return (
                f"a sum over samples, divided by {self.divisor}, to which the file fixes the batch"
            )
        return "a sum over samples: the losses of micro-batches are added up"

    @property
    def ratio_text(self) -> str:
        """The form of a loss of kind RATIO as a noun phrase for messages, such as "the square root
        of a sum over samples".
        """
        assert self.ratio is not None
        total = "a mean over samples" if self.ratio.degree else "a sum over samples"
        divided = total if self.ratio.divisor is None else "a mean weighed by values of the batch"
        return f"the square root of {divided}" if self.ratio.root else divided


@dataclass(frozen=True, slots=True)
class SampleMixing:
    """Reason why an output of a model may depend on how a batch is divided, as found by
    `sample_mixing`.
    """

    reason: str = ""
    """Clause for messages, such as "MaxPool 'pool' does not keep samples apart"; "" if no output
    depends on the division.
    """
    name: str = ""
    """Name of the node or value that `reason` is about; "" if there is no reason."""


class _BaseForm(enum.Enum):
    FIXED = "fixed"
    UNIFORM = "uniform"
    EACH = "each"
    TOTAL = "total"
    BOUNDED = "bounded"
    """A TOTAL (a sum over samples) plus a constant, or the maximum of a TOTAL and a constant. Of
    the operators that compute with this value, only the division of another TOTAL by it gives a
    form other than MIXED.
    """
    RATIO = "ratio"
    """A TOTAL (a sum over samples) divided by a TOTAL or a BOUNDED of the same degree. The divisor
    depends on no trained parameter.
    """
    ROOT = "root"
    """The square root of a TOTAL (a sum over samples) or of a RATIO (a quotient of such sums)."""
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class _Form:
    """The form of a value: how its value for a batch follows from its values for parts of the
    batch. The docstring of the module defines the forms.

    degree: the exponent d of the number of samples. For a RATIO or a ROOT, the degree of the TOTAL
    from which it is computed: 0 for a sum over samples, -1 for a mean.
    divisor: for a sum over samples that is divided by a constant, this constant; otherwise None.
    """

    base: _BaseForm
    degree: int = 0
    divisor: int | None = None
    mixing: SampleMixing = SampleMixing()
    """Reason for a MIXED form; empty for other forms."""
    operator: str = ""
    """For a MIXED form: the operator of the node that mixes samples, or "" if the form is due to a
    parameter or a constant. "" for other forms.
    """
    divided_by: Divisor | None = None
    """Divisor of a RATIO, and of the RATIO under a ROOT. For a BOUNDED, the value itself as a
    divisor. Otherwise None.
    """

    @property
    def reason(self) -> str:
        return self.mixing.reason

    @property
    def has_samples(self) -> bool:
        return self.base in (_BaseForm.UNIFORM, _BaseForm.EACH)

    @property
    def text(self) -> str:
        """The form as a noun phrase for messages, such as "a sum over samples"."""
        if self.base is _BaseForm.TOTAL:
            divided = "" if self.divisor is None else f" divided by {self.divisor}"
            return "a mean over samples" if self.degree == -1 else f"a sum over samples{divided}"
        if self.base is _BaseForm.FIXED and self.degree:
            return "the number of samples"
        return _TEXTS.get(self.base, "a value of each sample")


_TEXTS = {
    _BaseForm.FIXED: "a value that depends on no sample",
    _BaseForm.BOUNDED: "a sum over samples",
    _BaseForm.RATIO: "a mean weighed by values of the batch",
    _BaseForm.ROOT: "the square root of a total",
}


_FIXED = _Form(_BaseForm.FIXED)
_EACH = _Form(_BaseForm.EACH)

_ADDING = operators_with(lambda row: row.linear == "together")
"""Operators whose result is linear in all of their floating-point operands together, such as Add.
"""
_SUMS = operators_with(lambda row: row.adds)
_MULTIPLYING = operators_with(lambda row: row.linear == "each")
"""Operators whose result is linear in each operand while the others are fixed, such as Mul."""
_SAME = operators_with(lambda row: row.same_elements) | {"Cast"}
"""Operators that only change the type or shape of an operand."""
_REDUCING = frozenset({"Mean", "ReduceMean", "ReduceSum", "Sum"})
_DIVIDED = (_BaseForm.BOUNDED, _BaseForm.RATIO, _BaseForm.ROOT)
_DECIDED = frozenset({"DynamicQuantizeLinear", "GatherND", "MaxUnpool", "ScatterND"})
"""Inference operators that gather or scatter samples, or depend on other samples only through
rounding. If the form of their results is MIXED, this does not prove that results depend on the
division of a batch.
"""
_TOGETHER = "takes the samples of a batch together"
"""Predicate of messages about an operator that cannot split the sample axis."""
_REPEATING = frozenset({"Expand", "Tile", "ConstantOfShape"})
"""Operators that repeat a value along an axis. They turn a FIXED value (independent of samples)
into a UNIFORM value (equal entries for all samples).
"""


def loss_form(graph: Graph, loss: str, other: Graph | None, fixed: int | None) -> LossForm:
    """Return how the value `loss` of `graph` depends on the losses of parts of a batch.

    `graph` has at least 2 samples. `other` is the graph of the same model for another number of
    samples; None if the model cannot be read for another number. `fixed` is the batch size that the
    model file fixes; None if the file leaves it open.
    """
    forms = _FormAnalysis(graph, other, fixed)
    found = forms.form_of_value(loss)
    if found.base in (_BaseForm.MIXED, _BaseForm.BOUNDED):
        reason = found.reason or f"it is {found.text} and a constant"
        return LossForm(LossKind.MIXED, reason, fixed)
    if found.base in (_BaseForm.RATIO, _BaseForm.ROOT) and found.degree in (0, -1):
        ratio = Ratio(found.divided_by, found.base is _BaseForm.ROOT, found.degree, forms.ratios)
        return LossForm(LossKind.RATIO, samples=fixed, ratio=ratio)
    power = found.degree + (found.base is _BaseForm.TOTAL)
    if found.has_samples or found.base in _DIVIDED or power not in (0, 1):
        return LossForm(
            LossKind.MIXED, f"it grows with the power {power} of the number of samples", fixed
        )
    if power == 0:
        return LossForm(LossKind.MEAN, samples=fixed)
    # If a file divides a sum by a constant, it fixes the batch size to the size for which this
    # constant was computed. A file for another batch size would contain another constant.
    return LossForm(LossKind.SUM, samples=fixed, divisor=found.divisor)


def sample_mixing(graph: Graph, other: Graph | None) -> SampleMixing:
    """Return the reason why some output of `graph` may depend on how a batch is divided, or an
    empty `SampleMixing` if no reason is found.

    `graph` has at least 2 samples. `other` is the graph of the same model for another number of
    samples, or None. Sums and means over samples and operators in `_DECIDED` are accepted here,
    because `joined_samples` checks them.
    """
    forms = _FormAnalysis(graph, other, None)
    for name in graph.outputs:
        counts_samples = SampleMixing(
            f"output {name!r} depends on the number of samples in a batch", name
        )
        constant = graph.constant(name)
        if constant is not None:
            another = None if other is None else other.constant(name)
            if another is not None and not np.array_equal(constant.array, another.array):
                return counts_samples
            continue
        form = forms.form_of_value(name)
        if form.degree and form.base is not _BaseForm.TOTAL:
            return counts_samples
        # A MaxPool that returns indices into the full batch cannot split the sample axis, and
        # `joined_samples` checks these indices. A MaxPool whose windows cover several samples
        # states another reason and is rejected here.
        is_index = form.operator == "MaxPool" and form.reason.endswith(_TOGETHER)
        if form.base is _BaseForm.MIXED and form.operator not in _DECIDED and not is_index:
            return form.mixing
    return SampleMixing()


class _FormAnalysis:
    """Computes the forms of values of one graph, in the order of the nodes, and stores them by
    name. The form of a value is how its value for a batch follows from its values for parts of the
    batch.
    """

    def __init__(self, graph: Graph, other: Graph | None, fixed: int | None) -> None:
        self._graph = graph
        self._other = other
        self._fixed = fixed
        self._axes: BatchAxes = batch_axes_of(graph)
        self._forms: dict[str, _Form] = {}
        self._trained = differentiable_values(graph)

    @property
    def ratios(self) -> tuple[str, ...]:
        """Names of the values that are a RATIO (a quotient of sums over samples) or a ROOT (the
        square root of a sum over samples or of a RATIO), in the order of the nodes that write them.
        The property covers the values for which `form_of_value` was called, and the values on which
        they depend.
        """
        return tuple(
            name
            for name, form in self._forms.items()
            if form.base in (_BaseForm.RATIO, _BaseForm.ROOT)
        )

    def form_of_value(self, wanted: str) -> _Form:
        """Return the form of the value `wanted`. Computes the forms of the values on which it
        depends first.
        """
        graph = self._graph
        for value in graph.inputs:
            self._forms[value.name] = _EACH if value.name in self._axes.values else _FIXED
        for parameter in graph.parameters:
            self._forms[parameter.value.name] = self._form_of_parameter(parameter.value.name)
        needed = self._ancestors(wanted)
        for index, node in enumerate(graph.nodes):
            # This method runs once per output, and several outputs can depend on one node. A node
            # whose results already have a form is therefore skipped.
            if index in needed and self._forms.keys().isdisjoint(filter(None, node.outputs)):
                self._store_forms_of_results(index, node)
        return self._forms[wanted]

    def _ancestors(self, wanted: str) -> set[int]:
        """Return the indices of the nodes that the value `wanted` depends on."""
        found: set[int] = set()
        waiting = [wanted]
        while waiting:
            index = self._graph.producer(waiting.pop())
            if index is not None and index not in found:
                found.add(index)
                waiting += filter(None, self._graph.nodes[index].inputs)
        return found

    def _form_of_parameter(self, name: str) -> _Form:
        """Return the form of a parameter: MIXED if it has an entry for each sample of a batch,
        otherwise FIXED, because it does not depend on samples.
        """
        if name not in self._axes.values:
            return _FIXED
        return _Form(
            _BaseForm.MIXED,
            mixing=SampleMixing(f"{name!r} has an entry for each sample of a batch", name),
        )

    def _form_of_constant(self, constant: Constant, node: Node, place: int) -> _Form:
        """Return the form of a constant that is the operand with index `place` of a node. It is
        FIXED if it has no batch dimension, UNIFORM if it has equal entries for all samples, or
        MIXED. FIXED and UNIFORM have a degree d: the constant is proportional to (number of
        samples)^d.

        MIXED stands for a constant whose entries differ between samples, or that depends on the
        number of samples otherwise than by a power of degree -1, 0 or 1.
        """
        name = constant.value.name
        reason = f"constant {name!r} depends on the number of samples or on their order"
        mixed = _Form(_BaseForm.MIXED, mixing=SampleMixing(reason, name))
        array = _entry_of_one_sample(constant, self._axes)
        if array is None:
            return mixed
        degree: int | None = 0
        if self._other is not None:
            degree = self._degree_of_constant(self._other, node, place, array)
        if degree is None:
            return mixed
        return _Form(_BaseForm.UNIFORM if self._axes.values.get(name) else _BaseForm.FIXED, degree)

    def _degree_of_constant(
        self, graph: Graph, node: Node, place: int, array: np.ndarray
    ) -> int | None:
        """Return d if the constant that is the operand with index `place` of a node grows as n^d
        for n samples, where d is -1, 0 or 1; None if the constant depends on n in another way.

        `array` is the constant for this graph's number of samples, or its entry for one sample if
        it has an entry per sample. `graph` is the graph for another number of samples. The constant
        in `graph` is found through the node, because equal constants of a graph share one name.
        """
        index = graph.producer(next(filter(None, node.outputs)))
        name = (
            "" if index is None else (*graph.nodes[index].inputs, *[""] * len(node.inputs))[place]
        )
        found = graph.constant(name)
        if found is None:
            # The other graph lacks this node or its constant, so the two constants cannot be
            # compared. The constant is assumed to be independent of the number of samples.
            return 0
        axes = batch_axes_of(graph)
        other = _entry_of_one_sample(found, axes)
        if other is None or other.shape != array.shape:
            return None
        if np.array_equal(other, array, equal_nan=array.dtype.kind in "fc"):
            return 0
        if array.dtype.kind == "b":
            return None
        growth = axes.batch / self._axes.batch
        for degree in (1, -1):
            if np.allclose(
                other.astype(np.float64),
                array.astype(np.float64) * growth**degree,
                rtol=1e-5,
                atol=0,
            ):
                return degree
        return None

    def _store_forms_of_results(self, index: int, node: Node) -> None:
        """Compute and store the forms of the results of the node at `index`."""
        form = self._form_of_node(index, node)
        for place, name in enumerate(node.outputs):
            if not name:
                continue
            if node.op == "BatchNormalization" and place > 0:
                # These results are running statistics. They do not affect a loss, so they count as
                # independent of samples.
                self._forms[name] = _FIXED
            else:
                self._forms[name] = self._form_of_result(node, name, form)

    def _form_of_result(self, node: Node, name: str, form: _Form) -> _Form:
        """Return the form of the result `name` of a node.

        `form` is the form that the node gives to its results. It is corrected for a result whose
        batch dimensions do not match it. For example, FIXED (independent of samples) becomes
        UNIFORM (equal entries for all samples) if the node repeats the value for each sample. A
        result without a possible correction is MIXED.
        """
        if form.base is _BaseForm.MIXED:
            return form
        places = self._axes.values.get(name, ())
        if len(places) > 1:
            return _mixed_form(node, "relates the samples of a batch to one another")
        if bool(places) == form.has_samples:
            return form
        if not places:
            return _mixed_form(node, "does not keep samples apart")
        if form.base is _BaseForm.FIXED and node.op in _REPEATING:
            return replace(form, base=_BaseForm.UNIFORM)
        row = operator_of(node)
        if form.base is _BaseForm.FIXED and row is not None and row.random:
            return _EACH
        return _mixed_form(node, f"makes entries of samples of {form.text}")

    def _form_of_node(self, index: int, node: Node) -> _Form:
        """Return the form that a node gives to its results, from the forms of its operands."""
        row = operator_of(node)
        read = [(place, name) for place, name in enumerate(node.inputs) if name]
        if row is not None:
            read = [(place, name) for place, name in read if place not in row.static]
        operands = [self._form_of_operand(node, place, name) for place, name in read]
        for each in operands:
            if each.base is _BaseForm.MIXED:
                return each
        if all(each == _FIXED for each in operands) and not any(
            name in self._axes.values for _, name in read
        ):
            return _FIXED
        if row is None:
            return _mixed_form(node, "has no row")
        return self._form_of_sample_node(index, node, row, [name for _, name in read], operands)

    def _form_of_operand(self, node: Node, place: int, name: str) -> _Form:
        """Return the form of `name`, a value or a constant, which is the operand with index `place`
        of a node.
        """
        constant = self._graph.constant(name)
        return (
            self._forms[name] if constant is None else self._form_of_constant(constant, node, place)
        )

    def _form_of_sample_node(
        self, index: int, node: Node, row: Operator, names: list[str], operands: list[_Form]
    ) -> _Form:
        """Return the form that a node gives to its results, in the case that an operand contains
        samples or was computed from samples or their number, and that no operand is MIXED.

        `names` and `operands` are the names and forms of the operands, without absent and static
        operands.
        """
        signature = signature_of(self._graph, node)
        samples = self._axes.nodes[index]
        has_samples = any(each.has_samples for each in operands)
        if any(each.base in _DIVIDED for each in operands):
            return self._form_after_division(node, names, operands)
        if is_label_loss(node) and loss_reduction(signature) == "mean":
            combined = _form_of_nonlinear(node, operands)
            if combined.base is _BaseForm.MIXED:
                return combined
            if not signature.present(2) or not self._has_unequal_class_weights(node):
                return _Form(_BaseForm.TOTAL, -1)
            if node.inputs[2] in self._trained or node.op == "LinearCrossEntropy":
                return _mixed_form(node, "divides by the weights of the labels of a batch")
            return _Form(_BaseForm.RATIO, divided_by=Divisor(node.name))
        if uses_batch_statistics(signature):
            return _form_of_nonlinear(node, operands)
        if has_samples and (
            not samples
            or self._axes.value_without_batch_axis(
                self._graph, spaces_of(self._graph)(index), index
            )
        ):
            return _mixed_form(node, "does not keep samples apart")
        if len({each.axis for each in samples}) > 1 or len(samples) > 1:
            return _mixed_form(node, "relates the samples of a batch to one another")
        combined = self._form_before_reduction(node, names, operands)
        kind = samples[0].kind if samples and has_samples else AxisKind.PARALLEL
        if combined.base is _BaseForm.MIXED or kind is AxisKind.PARALLEL:
            return combined
        if kind not in (AxisKind.SUM, AxisKind.MEAN) or not combined.has_samples:
            return _mixed_form(node, _TOGETHER)
        degree = combined.degree + (combined.base is _BaseForm.UNIFORM) - (kind is AxisKind.MEAN)
        divisor = None if kind is AxisKind.MEAN else combined.divisor
        return _Form(
            _BaseForm.FIXED if combined.base is _BaseForm.UNIFORM else _BaseForm.TOTAL,
            degree,
            divisor,
        )

    def _has_unequal_class_weights(self, node: Node) -> bool:
        """True unless the class weights of a label loss (operand 2) are a constant with equal
        entries.
        """
        weights = self._graph.constant(node.inputs[2])
        return weights is None or bool(np.any(weights.array != weights.array.reshape(-1)[:1]))

    def _form_before_reduction(self, node: Node, names: list[str], operands: list[_Form]) -> _Form:
        """Return the form that a node's elementwise computation gives, before the node reduces over
        samples.
        """
        if node.op == "StopGradient":
            return operands[0]
        if node.domain:
            return _form_of_nonlinear(node, operands)
        if node.op == "Gemm":
            product = _form_of_product(node, operands[:2])
            return product if len(operands) < 3 else _form_of_sum(node, [product, *operands[2:]])
        if node.op == "Div":
            return self._form_of_quotient(node, names, operands)
        if (
            self._is_square_root(node)
            and operands[0].base is _BaseForm.TOTAL
            and self._has_one_element(node.outputs[0])
        ):
            return _Form(_BaseForm.ROOT, operands[0].degree)
        if (bounded := self._form_of_bounded_total(node, names, operands)) is not None:
            return bounded
        if node.op in _MULTIPLYING:
            return _form_of_product(node, operands)
        if node.op in _ADDING and self._graph.type_of(node.outputs[0]).dtype.is_floating:
            pairs = zip(names, operands, strict=True)
            added = [form for name, form in pairs if not self._is_neutral_operand(node, name, form)]
            return _form_of_sum(node, added or operands)
        return _form_of_nonlinear(node, operands)

    def _is_neutral_operand(self, node: Node, name: str, form: _Form) -> bool:
        """True for an operand `name` of the form `form` that cannot change the form of a sum: a
        constant zero that is added, or an operand that only selects, such as an index or a
        condition. An operand that selects for each sample, or by the number of samples, can change
        the form.
        """
        constant = self._graph.constant(name)
        if constant is not None and not np.any(constant.array) and node.op in _SUMS:
            return True
        return form == _FIXED and not self._graph.type_of(name).dtype.is_floating

    def _form_of_quotient(self, node: Node, names: list[str], operands: list[_Form]) -> _Form:
        """Return the form of the result of a Div."""
        top, bottom = operands
        if bottom.base is _BaseForm.TOTAL:
            return self._form_of_ratio(node, top, bottom.degree, self._as_divisor(names[1], bottom))
        found = _form_of_product(node, [top, replace(bottom, degree=-bottom.degree, divisor=None)])
        is_sum = (
            found.base in (_BaseForm.TOTAL, _BaseForm.EACH)
            and found.degree == 0
            and found.divisor is None
        )
        divisor = self._positive_integer(names[1])
        if not is_sum or divisor is None or self._fixed is None or divisor % self._fixed:
            return found
        # Every integer is a multiple of 1. If the file fixes the batch to one sample, a divisor
        # above 1 does not prove a division by the batch size.
        return found if self._fixed == 1 and divisor > 1 else replace(found, divisor=divisor)

    def _form_of_ratio(self, node: Node, top: _Form, degree: int, divisor: Divisor | None) -> _Form:
        """Return the form of `top` divided by a TOTAL (a sum over samples) or a BOUNDED (such a sum
        plus a constant, or its maximum with a constant): a RATIO, or MIXED if this is not possible.

        `degree` is the degree of the divisor: 0 for a sum, -1 for a mean. `divisor` is None if
        `_as_divisor` rejected it. A RATIO requires that `top` is a TOTAL of the same degree,
        without a constant divisor, and has the shape of the result.
        """
        is_total = top.base is _BaseForm.TOTAL and top.degree == degree and top.divisor is None
        shapes = {self._graph.type_of(name).shape for name in (node.inputs[0], node.outputs[0])}
        if divisor is None or not is_total or len(shapes) > 1:
            return _mixed_form(
                node,
                "divides by a sum over samples"
                if degree == 0
                else "divides by a mean over samples",
            )
        return _Form(_BaseForm.RATIO, degree, divided_by=divisor)

    def _as_divisor(self, name: str, form: _Form) -> Divisor | None:
        """Return the TOTAL `name`, a sum over samples of the form `form`, as a divisor. None if it
        has several elements, depends on a trained parameter, or is itself divided by a constant
        batch size.
        """
        if form.divisor is not None or name in self._trained or not self._has_one_element(name):
            return None
        return Divisor(name, form.degree)

    def _has_one_element(self, name: str) -> bool:
        """True if the value has exactly one element."""
        return self._graph.type_of(name).elements == 1

    def _form_of_bounded_total(
        self, node: Node, names: list[str], operands: list[_Form]
    ) -> _Form | None:
        """Return the form BOUNDED of a TOTAL (a sum over samples) plus a constant, or of the
        maximum of a TOTAL and a constant.

        None for other nodes, for a mean over samples plus a constant, and if `_as_divisor` rejects
        the TOTAL.
        """
        totals = [
            name for name, form in zip(names, operands, strict=True) if form.base is _BaseForm.TOTAL
        ]
        if (
            node.op not in ("Add", "Max", "Clip")
            or len(totals) != 1
            or not self._has_one_element(node.outputs[0])
        ):
            return None
        divisor = self._as_divisor(totals[0], self._forms[totals[0]])
        others = [name for name in node.inputs if name and name != totals[0]]
        constant = self._graph.constant(others[0]) if len(others) == 1 else None
        if divisor is None or constant is None or constant.array.size != 1:
            return None
        place = node.inputs.index(others[0])
        if (node.op == "Clip" and place != 1) or self._form_of_constant(
            constant, node, place
        ) != _FIXED:
            return None
        number = float(constant.array.reshape(()))
        if node.op != "Add":
            return _Form(_BaseForm.BOUNDED, divided_by=replace(divisor, minimum=number))
        # The form BOUNDED is for a constant added to a sum over samples. A constant plus a mean
        # over samples is a mean over samples again, which `_form_of_sum` determines.
        return (
            _Form(_BaseForm.BOUNDED, divided_by=replace(divisor, added=number))
            if divisor.degree == 0
            else None
        )

    def _is_square_root(self, node: Node) -> bool:
        """True for a Sqrt, and for a Pow with the constant exponent 0.5."""
        if node.op == "Pow":
            exponent = self._graph.constant(node.inputs[1])
            return (
                exponent is not None
                and exponent.array.size == 1
                and float(exponent.array.reshape(())) == 0.5
            )
        return node.op == "Sqrt"

    def _form_after_division(self, node: Node, names: list[str], operands: list[_Form]) -> _Form:
        """Return the form that a node gives to its results if it reads a BOUNDED (a sum over
        samples plus a constant, or the maximum of such a sum and a constant), a RATIO (a quotient
        of sums over samples) or a ROOT (the square root of such a sum or quotient).
        """
        forms = [
            (form, name)
            for name, form in zip(names, operands, strict=True)
            if not self._is_neutral_operand(node, name, form)
        ]
        found = next(form for form, _ in forms if form.base in _DIVIDED)
        others = [form for form, _ in forms if form is not found]
        if node.op in _SAME and not node.domain and not others:
            return found
        if (
            found.base is _BaseForm.BOUNDED
            and node.op == "Div"
            and forms[1:]
            and forms[1][0] is found
        ):
            assert found.divided_by is not None
            return self._form_of_ratio(node, forms[0][0], found.divided_by.degree, found.divided_by)
        if found.base is not _BaseForm.RATIO or node.domain:
            return _mixed_form(node, f"computes a function of {found.text}")
        if self._is_square_root(node) and self._has_one_element(node.outputs[0]):
            return replace(found, base=_BaseForm.ROOT)
        assert found.divided_by is not None
        multiplies = node.op == "Mul" or (node.op == "Div" and forms[0][0] is found)
        adds = node.op in _SUMS
        if multiplies and others == [_FIXED]:
            return found
        if adds and all(
            each == found or (each == _FIXED and found.divided_by.is_plain) for each in others
        ):
            return found
        if node.op in (*_REDUCING, "Neg", "StopGradient") and not others:
            return found
        return _mixed_form(node, f"computes a function of {found.text}")

    def _positive_integer(self, name: str) -> int | None:
        """Return the value of the constant `name` if it is one positive integer; None otherwise, or
        if `name` is no constant.
        """
        constant = self._graph.constant(name)
        if constant is None or constant.array.size != 1:
            return None
        number = float(constant.array.reshape(()))
        return (
            int(number)
            if math.isfinite(number) and number > 0 and number == round(number)
            else None
        )


def _entry_of_one_sample(constant: Constant, axes: BatchAxes) -> np.ndarray | None:
    """Return the entry of one sample in a constant, or the full constant if it has no batch
    dimension.

    None if the entries of samples differ, or if several dimensions contain samples.
    """
    places = axes.values.get(constant.value.name, ())
    if not places:
        return constant.array
    if len(places) > 1:
        return None
    samples = _with_samples_first(constant.array, places[0].dimension, places[0].outer, axes.batch)
    return None if np.any(samples != samples[:1]) else samples[0]


def _with_samples_first(array: np.ndarray, dimension: int, outer: int, batch: int) -> np.ndarray:
    """Return the array with its samples on a new first axis, of size `batch`.

    The index along `dimension` consists of an outer index of size `outer`, the sample, and an inner
    index, in row-major order.
    """
    shape = array.shape
    inner = shape[dimension] // (outer * batch)
    apart = array.reshape(*shape[:dimension], outer, batch, inner, *shape[dimension + 1 :])
    return np.moveaxis(apart, dimension + 1, 0)


def _mixed_form(node: Node, what: str) -> _Form:
    """Return the form MIXED (the parts of a batch do not determine the value) for the results of a
    node, with a reason whose predicate is `what`.
    """
    return _Form(
        _BaseForm.MIXED,
        mixing=SampleMixing(f"{node.op} {node.name!r} {what}", node.name),
        operator=node.op,
    )


def _form_of_nonlinear(node: Node, operands: Iterable[_Form]) -> _Form:
    """Return the form of an elementwise nonlinear function of the operands. MIXED if an operand is
    a TOTAL (a sum over samples) or depends on the number of samples.
    """
    found = list(operands)
    for each in found:
        if each.base is _BaseForm.TOTAL or each.degree:
            return _mixed_form(node, f"computes a nonlinear function of {each.text}")
    bases = {each.base for each in found}
    if _BaseForm.EACH in bases:
        return _EACH
    return _Form(_BaseForm.UNIFORM) if _BaseForm.UNIFORM in bases else _FIXED


def _form_of_product(node: Node, operands: Sequence[_Form]) -> _Form:
    """Return the form of a function that is linear in each operand while the others are fixed.
    MIXED if it multiplies a TOTAL (a sum over samples) by another TOTAL or by a value per sample.
    """
    totals = [each for each in operands if each.base is _BaseForm.TOTAL]
    others = [each for each in operands if each.base not in (_BaseForm.FIXED, _BaseForm.TOTAL)]
    if len(totals) > 1:
        return _mixed_form(node, f"multiplies {totals[0].text} by {totals[1].text}")
    if totals and others:
        return _mixed_form(node, f"multiplies {others[0].text} by {totals[0].text}")
    degree = sum(each.degree for each in operands)
    divisor = next((each.divisor for each in operands if each.divisor is not None), None)
    if totals:
        return _Form(_BaseForm.TOTAL, degree, divisor)
    if any(each.base is _BaseForm.EACH for each in operands):
        return _Form(_BaseForm.EACH, degree, divisor)
    return _Form(_BaseForm.UNIFORM if others else _BaseForm.FIXED, degree, divisor)


def _form_of_sum(node: Node, operands: Sequence[_Form]) -> _Form:
    """Return the form of a function that is linear in all operands together, such as a sum. MIXED
    if the operands have forms or degrees that cannot be added, such as a sum over samples and a
    value per sample.
    """
    found = operands[0]
    for each in operands[1:]:
        if each == found:
            continue
        bases = {found.base, each.base}
        if found.degree == each.degree and _BaseForm.TOTAL not in bases:
            found = _Form(
                _BaseForm.EACH if _BaseForm.EACH in bases else _BaseForm.UNIFORM, found.degree
            )
            continue
        # A FIXED value does not depend on the samples, so it equals its own mean over samples.
        # FIXED plus a mean over samples is therefore a mean over samples.
        fixed, total = (found, each) if found.base is _BaseForm.FIXED else (each, found)
        if (
            bases == {_BaseForm.FIXED, _BaseForm.TOTAL}
            and fixed.degree == total.degree + 1
            and total.divisor is None
        ):
            found = total
            continue
        return _mixed_form(node, f"adds {found.text} and {each.text}")
    return found
