"""Search for the origin of tensors that an exporter computed from parameters (constant folding).

An exporter evaluates operators that depend only on parameters and writes the result as a new
tensor. Each new tensor is one of the following:

- It is a parameter in another layout, according to the file's metadata or the operator that reads
  the tensor. The graph then contains the tensor under the module's name, and `Layout` describes the
  module's layout.
- It can be computed from a parameter that the file also contains, or from a parameter that can be
  recovered from the tensor. The graph then computes the tensor.
- Its derivation is unknown. The tensor is refused: `Unfolding.refused` lists the parameters that
  the exporter computed it from, so that training the tensor instead of the parameters can be
  rejected.

PyTorch's newer exporter (dynamo) records in the file's metadata which parameters and which
operators of the traced program each tensor results from. PyTorch's older exporter (TorchScript)
writes no metadata; names and data are examined instead.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from autopipe.ir.graph import DType, FileSlice, FoldedSlice, Parameter, Value
from autopipe.passes.frontend.derivations import (
    MOVES,
    Step,
    apply_steps,
    find_derivation,
    find_weighted_sum,
)
from autopipe.passes.frontend.elements import read_slice
from autopipe.passes.frontend.fold_numbers import FoldNumbers
from autopipe.passes.frontend.joint_derivations import (
    Derivation,
    find_joint_derivation,
    find_sum_of_squares,
)
from autopipe.passes.frontend.merged_parameters import LOOKUPS, SAME
from autopipe.passes.frontend.parameters import LARGEST_LOOK, RESIZED, Roles
from autopipe.passes.frontend.signature import INTERNAL, NUMBERED, traced_call, traced_operator
from autopipe.passes.frontend.tables import is_random, is_uniform
from autopipe.passes.frontend.uses import ELEMENTWISE, GATES, LIFTED, Uses, scope_of

if TYPE_CHECKING:
    import onnx

ROW = "/row"
"""Suffix of the name of a new parameter: the single row from which the tensor was expanded."""
ROWS = "/rows"
"""Suffix of the name of a new parameter: the table of distinct rows from which the tensor was
indexed.
"""
LOGARITHM = "/log"
"""Suffix of the name of a new parameter: the logarithm of the tensor."""
COMPUTED = "/computed"
"""Suffix of the new name of a tensor that the exporter computed from a parameter but stored under
the parameter's name.
"""
LARGEST = 1 << 30
"""Maximum bytes of a tensor whose data are compared with another tensor."""
MASKED = -10.0
"""Maximum value that a mask adds at a hidden position. Masks add large negative numbers there."""
REPEATS = LOOKUPS | {"expand", "gather", "repeat", "tile"}
"""Operators of PyTorch's traced program that may repeat rows of a parameter in their result."""
TRANSPOSING = frozenset({"t", "transpose", "numpy_T", "permute"})
"""Operators of PyTorch's traced program that transpose a matrix."""
REORDERING = TRANSPOSING | {
    "view",
    "_unsafe_view",
    "reshape",
    "flatten",
    "unflatten",
    "unsqueeze",
    "squeeze",
    "flip",
    "select",
    "slice",
    "split",
    "split_with_sizes",
    "chunk",
    "getitem",
    "unbind",
    "narrow",
    "movedim",
    "swapaxes",
    "unfold",
}
"""Operators of PyTorch's traced program that move or drop elements, but do not repeat or change
any.
"""
INDEXING = frozenset({"arange", "iota", "zeros", "ones", "full"})
"""Operators of PyTorch's traced program that create tensors of indices. If one of them is present,
arithmetic operators may compute indices rather than elements of the result.
"""
SHIFTING = frozenset({"add", "sub", "neg"})
"""Operators of PyTorch's traced program that may compute indices from positions."""
BOUNDING = frozenset({"abs", "clamp", "minimum", "maximum"})
"""Operators of PyTorch's traced program that may clamp distances, so that they can be used as
indices.
"""
BUCKETING = BOUNDING | {
    "mul",
    "div",
    "log",
    "lt",
    "gt",
    "where",
    "full_like",
    "zeros_like",
    "scalar_tensor_default",
}
"""Operators of PyTorch's traced program that compute the bucket of a distance for T5's relative
position biases.
"""
SUMMING = frozenset({"sum", "mean", "mul", "div", "neg"}) | SAME
"""Operators of PyTorch's traced program that can compute a sum of elements with a constant
factor.
"""
NORMALIZING = re.compile(r"batch_norm|instance_norm")
"""Pattern of normalizations among the operators of PyTorch's traced program that an exporter folds
into the weights of the preceding layer.
"""
INDEXED_FIRST = re.compile(r"\(args = \(%\w+, \[%\w+\]\)")
"""Pattern of a call of `index` in PyTorch's traced program that indexes only the first axis."""
UNSQUEEZING = frozenset(
    {("group_norm", 1, "Mul"), ("group_norm", 2, "Add"), ("native_group_norm", 1, "Mul"),
     ("native_group_norm", 2, "Add"), ("prelu", 1, "PRelu"), ("_prelu_kernel", 1, "PRelu")}
)  # fmt: skip
"""Calls of PyTorch's traced program that add axes to a vector, so that it broadcasts. Each entry:
operator, position of the vector among the arguments, ONNX operator that reads the result.
"""
GROUP_NORM = frozenset({"Shape", "Reshape", "InstanceNormalization", "Mul", "Add"})
"""ONNX operators that PyTorch's older exporter writes for a group normalization."""
RECURRENT = frozenset(GATES)
"""ONNX operators of recurrent layers."""
RARE = 0.02
"""Maximum fraction of zeros in a matrix that was not masked. All-zero rows and columns do not
count.
"""
CHUNKED = 0.75
"""Maximum number of distinct elements, as a fraction of all elements, at which a tensor counts as
indexed from a table of single elements.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Folded:
    """A tensor of the file that is computed from its source: `value` is the result of the operators
    `steps` on `source`. The source is a new parameter, or the name of another tensor of the file.
    """

    value: Value
    source: Parameter | str
    steps: tuple[Step, ...]

    def apply(
        self, array: np.ndarray, others: Mapping[str, np.ndarray] | None = None
    ) -> np.ndarray:
        """Return the data of the tensor, computed from `array`, the data of the source. `others`
        maps the names in `self.others` to the data of these parameters.
        """
        return apply_steps(self.steps, array, others)

    @property
    def others(self) -> tuple[str, ...]:
        """Names of the parameters that steps use as second operand."""
        return tuple(step.other for step in self.steps if step.other)


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The invertible change from the layout that a parameter has in the PyTorch module to its
    layout in the file.
    """

    shape: tuple[int, ...]
    """Shape of the parameter in the module."""
    steps: tuple[Step, ...]
    """Operators that compute the file's tensor from the module's parameter."""

    @property
    def inverse(self) -> tuple[Step, ...]:
        """Operators that compute the module's parameter from the file's tensor."""
        shapes = (self.shape, *(step.shape for step in self.steps))
        found = [step.inverse(before) for step, before in zip(self.steps, shapes[:-1], strict=True)]
        return tuple(reversed(found))


@dataclass(frozen=True, slots=True)
class Unfolding:
    """Result of the search: the tensors of a file that are computed from parameters, by name."""

    folded: dict[str, Folded] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)
    """Change of layout of each parameter that the file stores in another layout, by the parameter's
    name in the module.
    """
    refused: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """For each tensor that is computed in an unknown way, and therefore not trained, the names of
    the parameters it comes from; () if they are unknown as well.
    """
    detached: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """For each tensor that is a detached copy, the names of the parameters that it copies."""
    doubtful: set[str] = field(default_factory=set)
    """Names of tensors that are taken for parameters because the only change is probably an added
    axis of size 1.
    """


def read_folded_data(parameter: Parameter, model: Path) -> np.ndarray | None:
    """Return the data of a parameter whose storage is a `FoldedSlice` of the file `model`: selected
    rows of a stored tensor, or its logarithm. Returns None if the element type cannot be read.
    """
    value = parameter.value
    place = parameter.storage
    assert isinstance(place, FoldedSlice)
    if not place.rows:
        array = read_slice(place, value.dtype, value.shape, model)
    else:
        count = place.length // value.dtype.itemsize
        flat = read_slice(place, value.dtype, (count,), model)
        columns = place.step * np.arange(value.shape[1])
        array = None if flat is None else flat[np.array(place.rows)[:, None] + columns]
    if array is None or not place.form:
        return array
    logarithm: np.ndarray = np.log(-array if place.form == "log of the negative" else array)
    return logarithm


def find_folds(
    parameters: Mapping[str, Parameter],
    roles: Roles,
    model: Path,
    taken: set[str],
    numbers: FoldNumbers,
) -> Unfolding:
    """Return how the exporter computed the tensors in `parameters` that are not parameters
    themselves.

    `roles` infers the roles of the file's tensors, `numbers` derives the number of folded operators
    from tensor names, and `taken` contains names that new parameters must not use. Returns an empty
    result if the file's metadata list its parameters.
    """
    if roles.stated is not None:
        return Unfolding()
    trained = {
        name: each for name, each in parameters.items() if each.trainable and _is_stored(each)
    }
    found = _FoldFinder(trained, roles, model, taken)
    if roles.signature:
        found.record_by_metadata()
    elif roles.from_torch:
        found.record_by_names_and_data(numbers)
    else:
        found.record_foreign(parameters)
    return found.result


def _is_stored(parameter: Parameter) -> bool:
    """True if a parameter has at least one element and its data are in a file."""
    return isinstance(parameter.storage, FileSlice) and bool(parameter.value.elements)


def _file_slice(parameter: Parameter) -> FileSlice:
    """Return the location of a parameter's data, which must be in a file."""
    assert isinstance(parameter.storage, FileSlice)
    return parameter.storage


@dataclass(frozen=True, slots=True)
class _FoldFinder:
    """Finds out how tensors were computed from parameters, and records it in `result`."""

    parameters: Mapping[str, Parameter]
    roles: Roles
    model: Path
    taken: set[str]
    """Names of values in the file, which a recovered parameter must not get."""
    result: Unfolding = field(default_factory=Unfolding)

    def read_data(self, parameter: Parameter) -> np.ndarray | None:
        """Return the data of a parameter; None if they cannot be read."""
        value = parameter.value
        if isinstance(parameter.storage, FoldedSlice):
            return read_folded_data(parameter, self.model)
        return read_slice(_file_slice(parameter), value.dtype, value.shape, self.model)

    def record_foreign(self, parameters: Mapping[str, Parameter]) -> None:
        """Record the tensors of a file that PyTorch did not export: copies of other tensors,
        expanded rows and indexed tables.
        """
        copies = dict(self._find_copies())
        for name, each in parameters.items():
            folded = (
                self._find_recoverable(each) if name not in copies and _is_stored(each) else None
            )
            if folded is not None:
                self.result.folded[name] = folded
        self.result.folded.update(copies)

    def record_by_metadata(self) -> None:
        """Record how the tensors of a file of PyTorch's newer exporter are computed. Its metadata
        list the parameters and the operators of the traced program that each tensor results from.
        """
        signature = self.roles.signature
        named = {
            name: each for name, each in self.parameters.items() if name in signature.parameters
        }
        groups: dict[str, list[Parameter]] = {}
        for name, each in self.parameters.items():
            if name in named:
                self._record_named(each, named)
                continue
            origins = signature.origins(name)
            if self._is_recurrent(name):
                continue
            if len(origins) > 1:
                self._record_joint(each, origins, named)
            elif "detach" in signature.operators(name):
                self._record_detached(each, named)
            elif origins[0] in named:
                if each.value.elements > 1 or not self._record_decay(each, origins, named):
                    self._record_derivation(named[origins[0]], each, origins)
            else:
                groups.setdefault(origins[0], []).append(each)
        for origin, tensors in groups.items():
            self._record_from_absent(origin, tensors)

    def _record_named(self, parameter: Parameter, named: Mapping[str, Parameter]) -> None:
        """Record how a tensor with the name of a parameter is computed, if it is not the parameter
        itself. Exporters also store computed tensors under a parameter's name.
        """
        name = parameter.value.name
        signature = self.roles.signature
        if name in signature.folded:
            folded = self._find_complement(parameter, named)
            if folded is None:
                folded = self._find_recoverable(parameter)
            operators = signature.operators(name) or {NUMBERED.sub("", name)}
            if folded is not None:
                self.result.folded[name] = folded
            elif not signature.folded[name] and not operators <= REORDERING | REPEATS:
                self.result.refused[name] = ()
            elif signature.operators(name) and not self._has_unchanged_elements(name):
                self._refuse_named(parameter, (name,))
            return
        normalized = self._folded_normalization(name)
        if normalized:
            self._refuse_named(parameter, (name, *normalized))

    def _refuse_named(self, tensor: Parameter, origins: tuple[str, ...]) -> None:
        """Mark the tensor as refused (not trainable), because it is computed in an unknown way from
        the parameters `origins`. It is named like one of them, and is therefore renamed.
        """
        name = tensor.value.name
        self.result.refused[name] = origins
        source = replace(tensor, value=replace(tensor.value, name=f"{name}{COMPUTED}"))
        self.result.folded[name] = Folded(tensor.value, source, ())

    def _folded_normalization(self, name: str) -> tuple[str, ...]:
        """Return the names of the parameters of a normalization that the exporter folded into the
        weight `name`; () if there is none.
        """
        signature = self.roles.signature
        for node, _ in self.roles.uses.readers.get(name, ()):
            if node.op_type.endswith("Normalization") or not NORMALIZING.search(
                traced_operator(node)
            ):
                continue
            arguments = traced_call(node)[1]
            found = [signature.arguments[each] for each in arguments if each in signature.arguments]
            others = tuple(each for each in found if each in signature.parameters and each != name)
            if name not in found:
                return others
        return ()

    def _is_recurrent(self, name: str) -> bool:
        """True if only recurrent layers read the tensor `name`, as weight, recurrence weight or
        bias. The exporter only moves elements of these tensors: it reorders gates and concatenates
        biases.
        """
        readers = self._reading_nodes(name)
        return bool(readers) and all(
            node.op_type in RECURRENT and 1 <= slot <= 3 for node, slot in readers
        )

    def _record_detached(self, tensor: Parameter, named: Mapping[str, Parameter]) -> None:
        """Record the origin of a tensor that results from a `detach` in the traced program.

        If the operators of the traced program only move elements and the file contains the
        parameter, the tensor is computed from it with a StopGradient. If they only move elements
        and no other tensor comes from the parameter, the tensor is recorded as a detached copy.
        Otherwise it is refused (not trainable).
        """
        name = tensor.value.name
        signature = self.roles.signature
        (origin,) = signature.origins(name)
        is_moved = signature.operators(name) - {"detach"} <= REORDERING | SAME | REPEATS
        steps = self.find_steps(named[origin], tensor) if origin in named and is_moved else None
        others = [
            each for each in self.parameters if each != name and origin in signature.origins(each)
        ]
        if steps is not None:
            stop = Step("StopGradient", tensor.value.shape)
            self.result.folded[name] = Folded(tensor.value, origin, (*steps, stop))
        elif is_moved and not others:
            self.result.detached[name] = (origin,)
        else:
            self.result.refused[name] = (origin,)

    def _record_joint(
        self, tensor: Parameter, origins: tuple[str, ...], named: Mapping[str, Parameter]
    ) -> None:
        """Record how `tensor` is computed from several parameters, `origins`. It is refused (not
        trainable) if the file lacks one of them, if a `detach` is involved, or if no derivation is
        found.
        """
        name = tensor.value.name
        if tensor.value.elements == 1 and self._record_decay(tensor, origins, named):
            return
        found: Derivation | None = None
        if "detach" not in self.roles.signature.operators(name) and all(
            each in named for each in origins
        ):
            found = self._find_joint_derivation(tensor, [named[each] for each in origins])
        if found is None:
            self.result.refused[name] = origins
        else:
            self.result.folded[name] = Folded(tensor.value, *found)

    def _record_decay(
        self, tensor: Parameter, origins: tuple[str, ...], named: Mapping[str, Parameter]
    ) -> bool:
        """Record that a scalar is a constant times the sum of the squares of the parameters
        `origins`, as for weight decay in the loss, and return True. Return False if it is not, or
        if its operators in the traced program do not compute a sum of squares.
        """
        operators = self.roles.signature.operators(tensor.value.name)
        is_sum = operators <= SUMMING - {"detach"} | {"pow", "add"} and "sum" in operators
        result = self.read_data(tensor)
        if not is_sum or result is None or not all(each in named for each in origins):
            return False
        arrays = {
            each: array for each in origins if (array := self.read_data(named[each])) is not None
        }
        if len(arrays) < len(origins) or tensor.value.dtype is not DType.FLOAT32:
            return False
        steps = find_sum_of_squares(arrays, result)
        if steps is None:
            return False
        self.result.folded[tensor.value.name] = Folded(tensor.value, origins[0], steps)
        return True

    def _find_joint_derivation(
        self, tensor: Parameter, bases: list[Parameter]
    ) -> Derivation | None:
        """Return (name, steps) if the data show that the steps compute `tensor` from the parameter
        `name` and the other parameters in `bases`. Returns None if no steps match the data, for
        types other than float32, and for large or uniform tensors.
        """
        if any(
            each.value.dtype is not DType.FLOAT32 or each.value.bytes > LARGEST_LOOK
            for each in (tensor, *bases)
        ):
            return None
        result = self.read_data(tensor)
        arrays = {
            each.value.name: array for each in bases if (array := self.read_data(each)) is not None
        }
        if (
            result is None
            or len(arrays) < len(bases)
            or any(is_uniform(each) for each in arrays.values())
        ):
            return None
        return find_joint_derivation(arrays, result)

    def _record_derivation(
        self, base: Parameter, tensor: Parameter, origins: tuple[str, ...]
    ) -> bool:
        """Record how `tensor` is computed from `base`, another tensor of the file, and return True.
        If no derivation is found, mark `tensor` as refused (not trainable), because it is computed
        from the parameters `origins` in an unknown way, and return False.
        """
        name = tensor.value.name
        steps = self.find_steps(base, tensor)
        if steps is None:
            self.result.refused[name] = origins
            return False
        self.result.folded[name] = Folded(tensor.value, base.value.name, steps)
        return True

    def _record_from_absent(self, origin: str, tensors: list[Parameter]) -> None:
        """Record how `tensors` are computed from the parameter `origin`, which the file does not
        contain.

        One of the tensors represents the parameter in the graph: preferably a tensor that is the
        full parameter in a known layout, otherwise one that consists of elements of the parameter.
        The other tensors are computed from that one, represent more parts of the parameter, or are
        refused (not trainable).
        """
        by_rank = sorted(tensors, key=lambda each: self._representative_rank(each, origin))
        unknown: list[Parameter] = []
        bases: list[Parameter] = []
        for each in by_rank:
            name = each.value.name
            copy = self._find_copy(each, bases)
            if copy is not None:
                self.result.folded[name] = copy
                continue
            layout = self._find_layout(each, origin) if not bases else None
            if layout is not None:
                self._record_named_layout(each, origin, layout)
            elif self._is_new_lookup(each) or (bases and self._overlaps(each, bases)):
                self.result.refused[name] = (origin,)
                continue
            elif self._has_unchanged_elements(name):
                folded = self._find_recoverable(each)
                if folded is not None:
                    self.result.folded[name] = folded
            elif (masked := self._find_masked_table(each)) is not None:
                self.result.folded[name] = masked
            elif not self._record_exponential(each, origin):
                unknown.append(each)
                continue
            bases.append(each)
        for each in unknown:
            if not self._record_sum(each, bases):
                self.result.refused[each.value.name] = (origin,)

    def _record_sum(self, tensor: Parameter, bases: list[Parameter]) -> bool:
        """Record that a scalar is a constant times the sum of `bases`, which are single elements of
        one parameter, and return True. Return False if it is not, or if its operators in the traced
        program do not compute a sum.
        """
        operators = self.roles.signature.operators(tensor.value.name)
        is_read = tensor.value.dtype in (DType.FLOAT32, DType.FLOAT64)
        if (
            not is_read
            or tensor.value.elements > 1
            or not operators <= SUMMING
            or operators.isdisjoint({"sum", "mean"})
        ):
            return False
        elements: dict[str, np.ndarray] = {}
        for base in bases:
            folded = self.result.folded.get(base.value.name)
            source = base if folded is None else folded.source
            array = self.read_data(source) if isinstance(source, Parameter) else None
            if array is None or array.size > 1:
                return False
            assert isinstance(source, Parameter)
            elements[source.value.name] = array
        result = self.read_data(tensor)
        steps = None if result is None or not elements else find_weighted_sum(elements, result)
        if steps is None:
            return False
        first = self.result.folded.get(bases[0].value.name)
        name = bases[0].value.name if first is None else next(iter(elements))
        self.result.folded[tensor.value.name] = Folded(tensor.value, name, steps)
        return True

    def _representative_rank(self, tensor: Parameter, origin: str) -> tuple[int, int]:
        """Return the key by which tensors are sorted before one is chosen to represent the
        parameter `origin`. Known layouts precede tensors of moved elements, then tensors that may
        repeat elements, then the remaining tensors. Within each group, larger tensors precede
        smaller tensors.
        """
        name = tensor.value.name
        if self._find_layout(tensor, origin) is not None:
            return 0, -tensor.value.elements
        if not self._has_unchanged_elements(name):
            return 3, -tensor.value.elements
        return 1 + (
            not REPEATS.isdisjoint(self.roles.signature.operators(name))
        ), -tensor.value.elements

    def _find_copy(self, tensor: Parameter, bases: list[Parameter]) -> Folded | None:
        """Return the derivation of `tensor` from the first tensor of `bases` that it can be
        computed from; None if there is none.
        """
        for base in bases:
            steps = self.find_steps(base, tensor)
            if steps is not None:
                return Folded(tensor.value, base.value.name, steps)
        return None

    def _is_new_lookup(self, tensor: Parameter) -> bool:
        """True if the tensor was indexed from a table and all its values are equal. The data then
        do not show which elements come from the same element of the table.
        """
        operators = self.roles.signature.operators(tensor.value.name)
        if operators.isdisjoint(LOOKUPS | {"gather"}) or tensor.value.elements == 1:
            return False
        array = self.read_data(tensor)
        return array is not None and array.nbytes <= LARGEST_LOOK and is_uniform(array)

    def _overlaps(self, tensor: Parameter, bases: list[Parameter]) -> bool:
        """True if a value of the tensor also occurs in a tensor of `bases`. False for tensors that
        are too large to compare.
        """
        mine = self.read_data(tensor)
        if mine is None or mine.nbytes > LARGEST_LOOK:
            return False
        arrays = [array for base in bases if (array := self.read_data(base)) is not None]
        return any(bool(np.isin(mine, array).any()) for array in arrays)

    def _record_named_layout(self, tensor: Parameter, origin: str, layout: Layout) -> None:
        """Record that the tensor is the parameter `origin` in the layout `layout`, under the
        parameter's name. Does nothing if another value uses that name.
        """
        if origin in self.taken:
            return
        self.taken.add(origin)
        source = replace(tensor, value=replace(tensor.value, name=origin))
        self.result.folded[tensor.value.name] = Folded(tensor.value, source, ())
        if layout.steps:
            self.result.layouts[origin] = layout

    def _find_layout(self, tensor: Parameter, origin: str) -> Layout | None:
        """Return the change of layout between the parameter `origin` and the tensor, which holds
        the full parameter. Returns None if the file does not determine the change.
        """
        name = tensor.value.name
        shape = tensor.value.shape
        counted = self.roles.signature.operator_counts(name)
        names = set(counted)
        if not names:
            return self._find_layout_by_calls(tensor, origin)
        if not names <= SAME - {"view", "expand", "detach"} | TRANSPOSING | {"unsqueeze", "flip"}:
            return None
        changes = {each: count for each, count in counted.items() if each not in SAME}
        if not changes:
            return Layout(shape, ()) if names else None
        if sum(changes.values()) == 1 and changes.keys() <= TRANSPOSING and len(shape) == 2:
            return _transposed_layout(shape)
        if sum(changes.values()) == 1 and changes.keys() == {"flip"} and len(shape) == 1:
            return Layout(shape, (Step("Gather", shape, operand=np.arange(shape[0])[::-1].copy()),))
        if changes.keys() == {"unsqueeze"} and shape.count(1) == changes["unsqueeze"]:
            # The number of axes of size 1 equals the number of `unsqueeze` calls, so each such axis
            # was added. The parameter's shape is therefore the shape without these axes.
            return Layout(
                tuple(extent for extent in shape if extent != 1), (Step("Reshape", shape),)
            )
        return None

    def _find_layout_by_calls(self, tensor: Parameter, origin: str) -> Layout | None:
        """Return the change of layout between the parameter `origin` and the tensor, inferred from
        the calls of the traced program that read the parameter. Returns None if the calls are of
        different kinds or of an unknown kind.

        A linear layer transposes its weight. Indexing along the first axis does not change the
        parameter. A group normalization or PReLU adds axes to a vector.
        """
        shape = tensor.value.shape
        readers = self.roles.uses.readers.get(tensor.value.name, ())
        slots = {(node.op_type, slot) for node, slot in readers}
        calls = {
            (traced_operator(node), self._argument_position(node, origin)) for node, _ in readers
        }
        if slots == {("MatMul", 1)} and calls == {("linear", 1)}:
            return _transposed_layout(shape)
        unsqueezed = {
            (traced_operator(node), self._argument_position(node, origin), node.op_type)
            for node, _ in readers
        }
        if (
            len(unsqueezed) == 1
            and unsqueezed <= UNSQUEEZING
            and max(shape, default=1) == tensor.value.elements
        ):
            return Layout((tensor.value.elements,), (Step("Reshape", shape),))
        along_first = all(INDEXED_FIRST.search(traced_call(node)[0]) for node, _ in readers)
        if slots <= {("GatherND", 0), ("Gather", 0)} and calls == {("index", 0)} and along_first:
            return Layout(shape, ())
        return None

    def _argument_position(self, node: onnx.NodeProto, origin: str) -> int:
        """Return the position of the parameter `origin` among the arguments of the call of the
        traced program that the node belongs to; -1 if it is not an argument.
        """
        arguments = traced_call(node)[1]
        places = [
            place
            for place, each in enumerate(arguments)
            if self.roles.signature.arguments.get(each) == origin
        ]
        return places[0] if places else -1

    def _has_unchanged_elements(self, name: str) -> bool:
        """True if the tensor `name` consists of unchanged elements of a parameter, according to the
        operators of the traced program that computed it.
        """
        signature = self.roles.signature
        operators = signature.operators(name)
        if not operators:
            return False
        if operators <= REORDERING | SAME | REPEATS:
            return True
        if operators.isdisjoint(LOOKUPS | {"gather"}) or signature.is_product(name):
            return False
        is_indexed = not operators.isdisjoint(INDEXING) or any(
            each in signature.buffers for each in signature.folded.get(name, ())
        )
        is_last = (
            bool(INTERNAL.fullmatch(name)) or NUMBERED.sub("", name) in REORDERING | SAME | REPEATS
        )
        return is_indexed and is_last and self._computes_indices(name)

    def _computes_indices(self, name: str) -> bool:
        """True if arithmetic operators of the traced program that contributed to the indexed tensor
        `name` compute indices, not elements.

        Additions are not examined, because training p + 1 is equivalent to training p.
        """
        counted = self.roles.signature.operator_counts(name)
        others = counted.keys() - (REORDERING | SAME | REPEATS | INDEXING | SHIFTING)
        if not others:
            return True
        if others <= BOUNDING:
            array = self.read_data(self.parameters[name])
            return array is not None and array.nbytes <= LARGEST_LOOK and not _looks_clamped(array)
        products = 1 + ("abs" in others), 2
        return (
            others <= BUCKETING
            and others >= {"log", "minimum", "lt"}
            and products == (counted.get("mul", 0), counted.get("div", 0))
        )

    def _record_exponential(self, tensor: Parameter, origin: str) -> bool:
        """Record that the tensor is the exponential of a parameter, possibly negated, recover the
        parameter as a logarithm, and return True. Return False if the tensor is not an exponential.
        The recovered parameter is called `origin` if its layout can be determined.
        """
        array = self.read_data(tensor)
        operators = self.roles.signature.operators(tensor.value.name)
        if array is None or not operators <= {"exp", "neg"} | REORDERING | SAME:
            return False
        folded = self._find_logarithm(tensor, array)
        if folded is None:
            return False
        source = folded.source
        if self._is_plain_exponential(tensor, folded) and origin not in self.taken:
            assert isinstance(source, Parameter)
            self.taken.add(origin)
            source = replace(source, value=replace(source.value, name=origin))
        self.result.folded[tensor.value.name] = replace(folded, source=source)
        return True

    def _is_plain_exponential(self, tensor: Parameter, folded: Folded) -> bool:
        """True if the tensor is exp(p) or -exp(p) for a parameter p in p's layout. False if the
        exporter invented the tensor's name: another operator may then have changed the layout.
        """
        name = tensor.value.name
        counted = self.roles.signature.operator_counts(name)
        is_negated = folded.steps[-1].operator == "Neg"
        if (
            INTERNAL.fullmatch(name)
            or counted.get("exp") != 1
            or counted.get("neg", 0) != int(is_negated)
        ):
            return False
        return counted.keys() <= {"exp", "neg"} | (SAME - {"view", "expand"})

    def _find_complement(self, copy: Parameter, named: Mapping[str, Parameter]) -> Folded | None:
        """Return how `copy` is computed as 1 minus a parameter of `named`; None if it is not. If
        several parameters match, as in a new model with equal data, the last one that is read
        before `copy` is used.
        """
        numbers = self.read_data(copy)
        if numbers is None or is_uniform(numbers):
            return None
        read = {name: place for place, name in enumerate(self.roles.uses.readers)}
        place = read.get(copy.value.name, 0)
        before = [each for each in named.values() if read.get(each.value.name, place) < place]
        for base in sorted(before, key=lambda each: -read[each.value.name]):
            steps = self.find_steps(base, copy) if base.value.shape == copy.value.shape else None
            if steps and steps[0].operator == "Sub":
                return Folded(copy.value, base.value.name, steps)
        return None

    def record_by_names_and_data(self, numbers: FoldNumbers) -> None:
        """Record how the tensors of a file of PyTorch's older exporter are computed. Such a file
        lacks metadata, so names and data are examined.
        """
        copies = dict(self._find_copies())
        modules = _module_nodes(self.roles.uses)
        candidates: dict[str, str] = {}
        for name, each in self.parameters.items():
            weight = (
                self._linear_weight(each, modules)
                if LIFTED.fullmatch(name) and name not in copies
                else ""
            )
            if weight:
                candidates[name] = weight
        linear = self._select_transposed(candidates, numbers)
        for name, each in self.parameters.items():
            if name in copies:
                continue
            if name in linear:
                layout = _transposed_layout(each.value.shape)
                assert layout is not None
                self._record_named_layout(each, linear[name], layout)
                continue
            folded = self._find_recoverable(each)
            if folded is None and LIFTED.fullmatch(name) and not self._is_recurrent(name):
                folded = self._derive_from_named(each)
                is_weight = name not in candidates and self._is_weight_of_module(each, numbers)
                if folded is None and not is_weight:
                    if not self._has_added_axis(each):
                        self.result.refused[name] = ()
                    elif not self._is_read_by_unsqueezing_layers(each, modules):
                        self.result.doubtful.add(name)
            if folded is not None:
                self.result.folded[name] = folded
        # Copies are added last, because a copy may read another computed tensor. The nodes that
        # compute the tensors are written in the order of this dictionary, so each source precedes
        # its copy.
        self.result.folded.update(copies)

    def _select_transposed(
        self, candidates: Mapping[str, str], numbers: FoldNumbers
    ) -> dict[str, str]:
        """Return the entries of `candidates` (tensor → weight of a linear layer) that are the
        weight of the layer and only transposed.

        Other candidates are functions of a weight. `numbers` counts the operators that were folded
        into a tensor, if tensor names determine the count; a transposition counts 1. If any count
        differs from 1, all tensors with an unknown count are omitted.
        """
        found: dict[str, str] = {}
        unknown: dict[str, str] = {}
        is_other_found = False
        for name, weight in candidates.items():
            count = numbers.count_operators(name)
            tensor = self.parameters[name]
            if (
                weight in self.taken
                or self._is_masked_matrix(tensor)
                or self._adds_bias_last(tensor)
            ):
                continue
            if count == 1:
                found[name] = weight
            elif count is None:
                if not self._follows_from_named(tensor):
                    unknown[name] = weight
            else:
                is_other_found = True
        return found if is_other_found else found | unknown

    def _adds_bias_last(self, tensor: Parameter) -> bool:
        """True if a parameter is added as second operand to the result of a matmul with the tensor.
        For a linear layer, the exporter writes the bias as first operand.
        """
        readers = self.roles.uses.readers
        products = [node.output[0] for node, _ in self._reading_nodes(tensor.value.name)]
        sums = [
            (node, slot)
            for name in products
            for node, slot in readers.get(name, ())
            if node.op_type == "Add"
        ]
        return any(slot == 0 and node.input[1] in self.parameters for node, slot in sums)

    def _follows_from_named(self, tensor: Parameter) -> bool:
        """True if operators that do more than move elements compute the tensor from a parameter of
        equal size that the file contains under its own name. If they only move elements, equal data
        may come from a copied layer.
        """
        for name, each in self.parameters.items():
            if each.value.elements == tensor.value.elements and not LIFTED.fullmatch(name):
                steps = self.find_steps(each, tensor)
                if steps is not None and not MOVES.issuperset(step.operator for step in steps):
                    return True
        return False

    def _is_masked_matrix(self, tensor: Parameter) -> bool:
        """True if more elements of a matrix are 0 than occur by chance, so that a mask was probably
        applied. All-zero rows and columns do not count.
        """
        array = self.read_data(tensor)
        if array is None or tensor.value.bytes > LARGEST or is_uniform(array):
            return False
        zeros = array == 0
        rows = np.logical_or(zeros.all(axis=1)[:, None], zeros.all(axis=0)[None])
        return int((zeros & ~rows).sum()) > RARE * array.size

    def _linear_weight(self, tensor: Parameter, modules: Mapping[str, list[onnx.NodeProto]]) -> str:
        """Return the name of the linear layer's weight that the tensor may be, transposed; "" if no
        linear layer reads the tensor.

        `modules` contains the nodes of each module. A linear layer is a module that consists of a
        MatMul and at most the Add of its bias.
        """
        readers = self._reading_nodes(tensor.value.name)
        if len(tensor.value.shape) != 2 or not readers:
            return ""
        if any(node.op_type != "MatMul" or slot != 1 for node, slot in readers):
            return ""
        # If a module is called several times, the exporter appends a number to its path. The
        # shortest path is that of the first call.
        path = min((_module_path(node) for node, _ in readers), key=len)
        nodes = modules.get(path, [])
        if not path or len(nodes) > 2:
            return ""
        for node in nodes:
            is_sum = node.op_type == "Add" and f"{path}.bias" in node.input
            is_product = any(node is each for each, _ in readers)
            if not is_sum and not is_product:
                return ""
        return f"{path}.weight"

    def _reading_nodes(self, name: str) -> list[tuple[onnx.NodeProto, int]]:
        """Return (node, operand index) for each node that reads the tensor `name`, directly or
        through an Identity.
        """
        readers = self.roles.uses.readers
        found: list[tuple[onnx.NodeProto, int]] = []
        for node, slot in readers.get(name, ()):
            if node.op_type == "Identity":
                found += readers.get(node.output[0], [])
            else:
                found.append((node, slot))
        return found

    def _derive_from_named(self, tensor: Parameter) -> Folded | None:
        """Return how the tensor is computed from a parameter that the file contains under the
        module's name; None if no parameter matches.
        """
        if tensor.value.bytes > LARGEST_LOOK:
            return None
        for name, each in self.parameters.items():
            if LIFTED.fullmatch(name) or each.value.bytes > LARGEST_LOOK:
                continue
            steps = self.find_steps(each, tensor)
            if steps is not None:
                return Folded(tensor.value, name, steps)
        return None

    def _is_weight_of_module(self, tensor: Parameter, numbers: FoldNumbers) -> bool:
        """True if the tensor counts as a parameter of a module rather than as a computed tensor.
        These are resized tables, operands of Exp, biases of attention, and matmul weights whose
        data look like a weight.

        A matmul weight does not count if the file contains another matrix of the same module under
        its own name. It does not count either if several operators were folded into it, according
        to `numbers`, and the module reads no other folded matrix.
        """
        readers = self._reading_nodes(tensor.value.name)
        slots = self.roles.uses.slots(tensor.value.name)
        if slots <= RESIZED or ("Exp", 0) in slots or self._is_bias_of_attention(tensor):
            return True
        if any(
            (node.op_type, slot) != ("MatMul", 1) or not _module_path(node)
            for node, slot in readers
        ):
            return False
        path = min((_module_path(node) for node, _ in readers), key=len)
        matrices = [name for name, each in self.parameters.items() if len(each.value.shape) > 1]
        if any(name.rpartition(".")[0] == path for name in matrices):
            return False
        if (numbers.count_operators(tensor.value.name) or 1) > 1:
            others = [
                name for name in matrices if LIFTED.fullmatch(name) and name != tensor.value.name
            ]
            if not any(
                _module_path(node) == path
                for name in others
                for node, _ in self._reading_nodes(name)
            ):
                return False
        array = self.read_data(tensor)
        return array is None or is_uniform(array) or is_random(array)

    def _is_bias_of_attention(self, tensor: Parameter) -> bool:
        """True if the tensor is one of the two parts of `in_proj_bias` of an
        `nn.MultiheadAttention` whose queries differ from its keys. The parts are the first third
        and the other two thirds.
        """
        readers = self._reading_nodes(tensor.value.name)
        if (
            len(tensor.value.shape) != 1
            or len(readers) != 1
            or readers[0][0].op_type != "Add"
            or readers[0][1]
        ):
            return False
        path = _module_path(readers[0][0])
        output = self.parameters.get(f"{path}.out_proj.bias")
        if output is None:
            return False
        shapes = [
            each.value.shape
            for name, each in self.parameters.items()
            if LIFTED.fullmatch(name)
            and [_module_path(node) for node, _ in self._reading_nodes(name)] == [path]
        ]
        width = output.value.elements
        parts = [(width,), (2 * width,)]
        return (
            sorted(each for each in shapes if len(each) == 1) == parts
            and sorted(each[1:] for each in shapes if len(each) == 2) == parts
        )

    def _has_added_axis(self, tensor: Parameter) -> bool:
        """True if only nodes inside modules read the tensor, and it is probably an unchanged
        parameter with an added axis of size 1. The exporter would have stored the parameter
        unchanged under the module's name if no axis had been added.

        Mamba, DeBERTa and GPT-OSS add axes to vectors and tables.
        """
        name = tensor.value.name
        shape = tensor.value.shape
        readers = self._reading_nodes(name)
        if 1 not in shape or not readers or not all(_module_path(node) for node, _ in readers):
            return False
        if all(self._is_weight_of_submodule(node, slot) for node, slot in readers):
            return True
        if not all(
            node.op_type in ELEMENTWISE | {"Expand", "MatMul", "PRelu"} for node, _ in readers
        ):
            return False
        if max(shape) == tensor.value.elements:
            return True
        array = self.read_data(tensor)
        return array is not None and (is_uniform(array) or is_random(array))

    def _is_read_by_unsqueezing_layers(
        self, tensor: Parameter, modules: Mapping[str, list[onnx.NodeProto]]
    ) -> bool:
        """True if the tensor is only read in layers that add axes to their parameters: modules with
        the operators of a group normalization, or with a PRelu alone.
        """
        found = [
            frozenset(each.op_type for each in modules.get(_module_path(node), ()))
            for node, _ in self._reading_nodes(tensor.value.name)
        ]
        return all(
            each == {"PRelu"} or ("InstanceNormalization" in each and each <= GROUP_NORM)
            for each in found
        )

    def _is_weight_of_submodule(self, node: onnx.NodeProto, slot: int) -> bool:
        """True if operand `slot` of the node is the weight of a convolution whose bias belongs to a
        submodule. The weight then also belongs to the submodule.

        If the bias does not belong to a submodule, the weight may be computed. An exporter that
        folds a normalization into the weight also computes the bias, and a module that computes a
        weight contains the convolution itself.
        """
        if node.op_type != "Conv" or slot != 1 or len(node.input) < 3:
            return False
        bias: str = node.input[2]
        owner, _, last = bias.rpartition(".")
        return last == "bias" and owner.startswith(f"{_module_path(node)}.")

    def _find_copies(self) -> Iterator[tuple[str, Folded]]:
        """Yield (name, derivation) for each tensor whose name PyTorch's older exporter invented and
        whose data can be computed from another tensor, by moving its elements or as 1 minus it.
        """
        if not any(LIFTED.fullmatch(name) for name in self.parameters):
            return
        groups: dict[tuple[DType, int, bytes], list[Parameter]] = {}
        complements: dict[tuple[DType, int, bytes], list[Parameter]] = {}
        for each in self.parameters.values():
            seen = len(each.value.shape) > 1 and each.value.bytes <= LARGEST
            array = self.read_data(each) if seen else None
            if array is not None:
                # Only tensors with equal first and last elements are compared, because
                # transpositions and reshapes do not move these elements.
                ends = np.array((array[(0,) * array.ndim], array[(-1,) * array.ndim]))
                size = each.value.dtype, each.value.elements
                groups.setdefault((*size, ends.tobytes()), []).append(each)
                if not LIFTED.fullmatch(each.value.name):
                    complements.setdefault((*size, (1 - ends).tobytes()), []).append(each)
        for key, group in groups.items():
            bases = list(complements.get(key, ()))
            # Tensors with a module's name are parameters, and later tensors may be copies of these
            # parameters.
            for each in sorted(group, key=lambda one: bool(LIFTED.fullmatch(one.value.name))):
                name = each.value.name
                for base in bases if LIFTED.fullmatch(name) else ():
                    steps = (
                        self.find_steps(base, each)
                        if self._may_be_copies(base.value.name, name)
                        else None
                    )
                    if steps is not None:
                        yield name, Folded(each.value, base.value.name, steps)
                        break
                else:
                    bases.append(each)

    def _may_be_copies(self, base: str, copy: str) -> bool:
        """True if equal data of two tensors are probably not a coincidence: `base` has a module's
        name, or the same modules read both tensors.
        """
        if not LIFTED.fullmatch(base):
            return True
        readers = self.roles.uses.readers
        return {scope_of(node) for node, _ in readers.get(base, ())} == {
            scope_of(node) for node, _ in readers.get(copy, ())
        }

    def find_steps(self, base: Parameter, copy: Parameter) -> tuple[Step, ...] | None:
        """Return the operators that compute `copy` from `base`; None if none are found or if the
        data are ambiguous. A change of layout that the file declares takes precedence over the
        comparison of data.
        """
        if base.value.dtype is not copy.value.dtype or copy.value.bytes > LARGEST:
            return None
        first = self.read_data(base)
        second = self.read_data(copy)
        if first is None or second is None:
            return None
        stated = self._declared_steps(base, copy, first, second)
        if stated is not None or self._is_ambiguous(first, copy):
            return stated
        return find_derivation(first, second)

    def _declared_steps(
        self, base: Parameter, copy: Parameter, first: np.ndarray, second: np.ndarray
    ) -> tuple[Step, ...] | None:
        """Return the change of layout that the file's metadata declare between the parameter `base`
        and `copy`. `first` and `second` are their data. Returns None if the metadata declare none
        or the data disagree.
        """
        origin = base.value.name
        if origin not in self.roles.signature.parameters:
            return None
        layout = self._find_layout(copy, origin)
        if layout is None or layout.shape != first.shape:
            return None
        return layout.steps if np.array_equal(apply_steps(layout.steps, first), second) else None

    def _is_ambiguous(self, first: np.ndarray, copy: Parameter) -> bool:
        """True if the data do not show which elements of `copy` come from which elements of the
        base, whose data are `first`. Examples are the equal values of a new layer and a symmetric
        matrix.
        """
        if not is_uniform(first):
            return (
                first.ndim == 2
                and first.shape == first.shape[::-1]
                and np.array_equal(first, first.T)
            )
        if not self.roles.signature:
            return True
        operators = self.roles.signature.operators(copy.value.name)
        return not operators <= SAME | {
            "reshape",
            "flatten",
            "unsqueeze",
            "squeeze",
            "repeat",
            "tile",
        }

    def _find_recoverable(self, parameter: Parameter) -> Folded | None:
        """Return how the tensor is computed from a parameter that can be recovered from it: a
        masked table, an expanded row, indexed rows, or an exponential. Returns None if it is none
        of these.
        """
        value = parameter.value
        if (
            value.bytes > LARGEST_LOOK
            or not value.dtype.is_floating
            or (array := self.read_data(parameter)) is None
        ):
            return None
        if len(value.shape) < 2 or (
            self.roles.uses.is_weight(value.name) and not self._may_repeat_rows(value.name)
        ):
            return self._find_logarithm(parameter, array)
        if (masked := self._find_mask(parameter, array)) is not None:
            return masked
        if self._may_be_expanded(value, array) and all(
            np.array_equal(array[0], row) for row in array[1:]
        ):
            return self._fold_from_row(parameter, array, 0, Step("Expand", value.shape))
        return self._find_lookup(parameter, array) or self._find_logarithm(parameter, array)

    def _find_lookup(self, parameter: Parameter, array: np.ndarray) -> Folded | None:
        """Return how the tensor `parameter`, with the data `array`, is indexed from a table of its
        distinct rows or elements. Returns None if it may not come from indexing.
        """
        name = parameter.value.name.removesuffix(ROW)
        if not parameter.trainable or is_uniform(array):
            return None
        wide = sum(extent > 1 for extent in array.shape)
        if self.roles.signature:
            possible = self._may_repeat_rows(name)
        else:
            possible = bool(LIFTED.fullmatch(name)) and wide > 2
        found = _lookup_of_rows(parameter, array) if possible else None
        if (
            found is None
            and wide > 1
            and (possible or (LIFTED.fullmatch(name) and _has_equal_diagonals(array)))
        ):
            return _lookup_of_elements(parameter, array)
        return found

    def _may_repeat_rows(self, name: str) -> bool:
        """True if the tensor `name` may repeat rows of a parameter, according to the operators of
        the traced program that computed it.
        """
        return not REPEATS.isdisjoint(self.roles.signature.operators(name))

    def _find_masked_table(self, parameter: Parameter) -> Folded | None:
        """Return how the tensor is computed by adding a mask to a table; None if it is not, or if
        it is too large to examine.
        """
        array = self.read_data(parameter)
        if array is None or array.ndim < 2 or parameter.value.bytes > LARGEST_LOOK:
            return None
        return self._find_mask(parameter, array)

    def _find_mask(self, parameter: Parameter, array: np.ndarray) -> Folded | None:
        """Return how the tensor `parameter`, with the data `array`, is computed by adding a mask to
        one row; None if it is not. The row is the unmasked row of the tensor's first axis.

        Shifted windows (Swin) add 0 or -100 to the same biases. At least one row must be unmasked;
        otherwise hidden biases cannot be recovered.
        """
        operators = self.roles.signature.operators(parameter.value.name)
        if not parameter.trainable or array.ndim < 2 or "masked_fill" not in operators:
            return None
        plain = int(np.argmax(array.reshape(len(array), -1).min(axis=1)))
        row = array[plain : plain + 1]
        mask = np.round(array - row)
        if not mask.any() or float(mask.min()) > MASKED or not np.array_equal(row + mask, array):
            return None
        for axis in range(1, mask.ndim):
            first = mask.take([0], axis)
            mask = first if np.array_equal(np.broadcast_to(first, mask.shape), mask) else mask
        return self._fold_from_row(
            parameter, array, plain, Step("Add", parameter.value.shape, operand=mask)
        )

    def _fold_from_row(
        self, parameter: Parameter, array: np.ndarray, at: int, step: Step
    ) -> Folded:
        """Return how the tensor `parameter`, with the data `array`, is computed by `step` from row
        `at` of its first axis. If that row itself is indexed from a table, the derivation starts at
        the table.
        """
        value = parameter.value
        place = _file_slice(parameter)
        length = place.length // len(array)
        row = replace(
            parameter,
            value=Value(f"{value.name}{ROW}", value.dtype, (1, *value.shape[1:])),
            storage=replace(place, offset=place.offset + at * length, length=length),
        )
        inner = self._find_lookup(row, array[at : at + 1])
        return (
            Folded(value, row, (step,))
            if inner is None
            else replace(inner, value=value, steps=(*inner.steps, step))
        )

    def _may_be_expanded(self, value: Value, array: np.ndarray) -> bool:
        """True if equal rows of a tensor may come from an expansion along the batch, rather than
        from the initial values of a new model.
        """
        if value.shape[0] < 2:
            return False
        if self.roles.signature:
            return self._may_repeat_rows(value.name)
        wide = len(value.shape) > (2 if self.roles.from_torch else 1)
        return wide and value.shape[0] in self.roles.samples and not is_uniform(array)

    def _find_logarithm(self, parameter: Parameter, array: np.ndarray) -> Folded | None:
        """Return how the tensor is computed as exp(p) or -exp(p) from p, its logarithm; None if no
        `exp` of the traced program contributed to it, or if the signs of the data do not fit.
        """
        operators = self.roles.signature.operators(parameter.value.name)
        if "exp" not in operators or not parameter.trainable:
            return None
        value = parameter.value
        place = _file_slice(parameter)
        steps: tuple[Step, ...] = (Step("Exp", value.shape),)
        form = "log"
        if not (array > 0).all():
            if not (array < 0).all() or "neg" not in operators:
                return None
            steps = (*steps, Step("Neg", value.shape))
            form = "log of the negative"
        storage = FoldedSlice(place.file, place.offset, place.length, form=form)
        return Folded(
            value,
            replace(
                parameter, value=replace(value, name=f"{value.name}{LOGARITHM}"), storage=storage
            ),
            steps,
        )


def _looks_clamped(array: np.ndarray) -> bool:
    """True if the elements look clamped: none is negative, or the minimum or maximum has at most
    three significant digits.
    """
    ends = np.array([array.min(), array.max()])
    if float(ends[0]) >= 0:
        return True
    return any(float(f"{float(end):.3g}") == np.float32(end) for end in ends)


def _transposed_layout(shape: tuple[int, ...]) -> Layout | None:
    """Return the layout of a matrix that the file stores transposed, with `shape` in the file; None
    if `shape` does not have two dimensions.
    """
    if len(shape) != 2:
        return None
    return Layout(shape[::-1], (Step("Transpose", shape, (1, 0)),))


def _module_path(node: onnx.NodeProto) -> str:
    """Return the path of the module that contains a node, from the node's name in files of
    PyTorch's older exporter; "" for the outermost module.
    """
    return ".".join(each for each in node.name.split("/")[:-1] if each)


def _module_nodes(uses: Uses) -> dict[str, list[onnx.NodeProto]]:
    """Return the nodes of each module by the module's path. Nodes of submodules and nodes that read
    nothing are not included.
    """
    found: dict[str, dict[str, onnx.NodeProto]] = {}
    for readers in uses.readers.values():
        for node, _ in readers:
            found.setdefault(_module_path(node), {})[node.output[0]] = node
    return {path: list(nodes.values()) for path, nodes in found.items()}


def _lookup_of_rows(parameter: Parameter, array: np.ndarray) -> Folded | None:
    """Return how a tensor is computed by indexing the table of its distinct rows with fixed
    indices; None if no row occurs twice.

    A row is a vector along one axis of the tensor. If rows repeat along several axes, the axis with
    the smallest table is used.
    """
    value = parameter.value
    place = _file_slice(parameter)
    best: tuple[int, int, np.ndarray, np.ndarray] | None = None
    for axis in (axis for axis, extent in enumerate(value.shape) if extent > 1):
        rows = np.ascontiguousarray(np.moveaxis(array, axis, -1)).reshape(-1, value.shape[axis])
        keys = rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).reshape(-1)
        _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        if len(first) < len(rows) and (best is None or len(first) * rows.shape[1] < best[0]):
            best = (len(first) * rows.shape[1], axis, first, inverse.reshape(-1))
    if best is None:
        return None
    _, axis, first, inverse = best
    # The rows of the table are in the order of their first occurrence in the tensor.
    order = np.argsort(first)
    rank = np.argsort(order)
    others = [at for at in range(len(value.shape)) if at != axis]
    outer = tuple(value.shape[at] for at in others)
    strides = [math.prod(value.shape[at + 1 :]) for at in range(len(value.shape))]
    places = np.unravel_index(first[order], outer)
    begins = np.asarray(sum(index * strides[at] for at, index in zip(others, places, strict=True)))
    width = value.shape[axis]
    table = Value(f"{value.name}{ROWS}", value.dtype, (len(first), width))
    stored = FoldedSlice(
        place.file, place.offset, place.length, tuple(begins.tolist()), strides[axis]
    )
    gathered = rank[inverse].reshape(outer).astype(np.int64)
    steps: tuple[Step, ...] = (Step("Gather", (*outer, width), operand=gathered),)
    last = len(others)
    if axis != last:
        steps = (*steps, Step("Transpose", value.shape, (*range(axis), last, *range(axis, last))))
    return Folded(value, replace(parameter, value=table, storage=stored), steps)


def _lookup_of_elements(parameter: Parameter, array: np.ndarray) -> Folded | None:
    """Return how a tensor is computed by indexing single elements of a vector with fixed indices;
    None if few elements occur twice.

    Elements with few significant bits can be equal by chance. Such elements must therefore be equal
    along diagonals, as in a table of relative positions.
    """
    flat = np.ascontiguousarray(array).reshape(-1)
    elements, first, inverse = np.unique(flat, return_index=True, return_inverse=True)
    if len(elements) > CHUNKED * flat.size or not (
        _exceeds_half_precision(elements) or _has_equal_diagonals(array)
    ):
        return None
    value = parameter.value
    place = _file_slice(parameter)
    # The elements of the vector are in the order of their first occurrence in the tensor.
    order = np.argsort(first)
    begins = tuple(first[order].tolist())
    table = Value(f"{value.name}{ROWS}", value.dtype, (len(elements), 1))
    stored = FoldedSlice(place.file, place.offset, place.length, begins, 1)
    indices = np.argsort(order)[inverse.reshape(-1)].reshape(value.shape).astype(np.int64)
    steps = (Step("Gather", (*value.shape, 1), operand=indices), Step("Reshape", value.shape))
    return Folded(value, replace(parameter, value=table, storage=stored), steps)


def _exceeds_half_precision(elements: np.ndarray) -> bool:
    """True if at least one element has more significant bits than float16 can represent."""
    bits = np.abs(elements.astype(np.float32)).view(np.uint32)
    return bool((bits & 0x1FFF).any())


def _has_equal_diagonals(array: np.ndarray) -> bool:
    """True if the elements along each diagonal of the last two axes are equal. False for a
    vector.
    """
    return array.ndim > 1 and np.array_equal(array[..., 1:, 1:], array[..., :-1, :-1])
