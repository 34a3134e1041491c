"""Parameters that an exporter folded operators into, in the form that the module has them in.

They stand in the file as new tensors, one for each use. Copies of one parameter are tied again, and what does not
commute with an update is taken out: the parameter is the logarithm, or one row for each place, and operators compute
the file's tensor from it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from autopipe.ir.graph import DType, FileSlice, FoldedSlice, Parameter, Value
from autopipe.passes.frontend.elements import sliced_numbers
from autopipe.passes.frontend.merged_parameters import LOOKUPS
from autopipe.passes.frontend.parameters import LARGEST_LOOK, Roles
from autopipe.passes.frontend.tables import is_uniform
from autopipe.passes.frontend.uses import LIFTED, scope_of

ROW = "/row"
"""Suffix of the name of an expanded parameter's one row."""
ROWS = "/rows"
"""Suffix of the name of a parameter's rows that are looked up at fixed places."""
LOGARITHM = "/log"
"""Suffix of the name of a tensor's logarithm."""
LARGEST = 1 << 30
"""Bytes beyond which a copy is not compared."""
BLOCK = 1 << 20
"""Elements compared at a time."""
SAMPLED = 64
"""Elements that are compared first: most tensors differ in them."""
MOST_AXES = 4
"""Axes up to which every transposition is tried."""
MASKED = -10.0
"""Most that a mask adds where it hides a position."""
REPEATS = LOOKUPS | {"expand", "gather", "repeat", "tile"}
"""Traced operators after which the rows of one parameter may stand several times."""
MOVES = frozenset({"Transpose", "Reshape", "Expand", "Gather"})
"""Steps that leave numbers as they are."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One operator of ONNX's on a tensor, with the shape of its result."""

    operator: str
    shape: tuple[int, ...]
    perm: tuple[int, ...] = ()
    """Transpose's order of the axes."""
    operand: np.ndarray | None = None
    """Taken besides the tensor: Gather's rows, numbers that Add adds, those that Sub takes the tensor from."""

    def apply(self, array: np.ndarray) -> np.ndarray:
        match self.operator:
            case "Transpose":
                return array.transpose(self.perm)
            case "Reshape":
                return array.reshape(self.shape)
            case "Expand":
                return np.broadcast_to(array, self.shape)
            case "Gather":
                return np.asarray(array[self.operand])
            case "Exp":
                return np.asarray(np.exp(array))
            case "Neg":
                return np.asarray(-array)
            case "Add":
                return np.asarray(array + self.operand)
        assert self.operator == "Sub", f"{self.operator} is folded nowhere"
        return np.asarray(self.operand - array)

    def inverse(self, shape: tuple[int, ...]) -> Step:
        """Return the operator that undoes this change of layout of a tensor of `shape`."""
        if self.operator == "Transpose":
            return Step("Transpose", shape, tuple(int(axis) for axis in np.argsort(self.perm)))
        assert self.operator == "Reshape", f"{self.operator} is no change of layout"
        return Step("Reshape", shape)


@dataclass(frozen=True, slots=True, eq=False)
class Folded:
    """A tensor of the file that is computed from a parameter, or from another tensor of the file."""

    value: Value
    source: Parameter | str
    steps: tuple[Step, ...]

    def apply(self, array: np.ndarray) -> np.ndarray:
        for step in self.steps:
            array = step.apply(array)
        return array


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The invertible change of layout from a module's parameter to the tensor that the file holds of it."""

    shape: tuple[int, ...]
    """Shape of the module's parameter."""
    steps: tuple[Step, ...]
    """Operators that make the file's tensor from the module's."""

    @classmethod
    def transposed(cls, shape: tuple[int, int]) -> Layout:
        """Return the layout of a matrix that the file holds with the shape `shape`, transposed."""
        return cls(shape[::-1], (Step("Transpose", shape, (1, 0)),))

    @property
    def inverse(self) -> tuple[Step, ...]:
        """The operators that make the module's tensor from the file's."""
        shapes = (self.shape, *(step.shape for step in self.steps))
        found = [step.inverse(before) for step, before in zip(self.steps, shapes[:-1], strict=True)]
        return tuple(reversed(found))


def folded_numbers(parameter: Parameter, model: Path) -> np.ndarray | None:
    """Return the data of a parameter that a `FoldedSlice` of the file `model` holds; None if its type is not one that
    numpy or this module reads."""
    value = parameter.value
    place = parameter.storage
    assert isinstance(place, FoldedSlice)
    if not place.rows:
        array = sliced_numbers(place, value.dtype, value.shape, model)
    else:
        count = place.length // value.dtype.itemsize
        flat = sliced_numbers(place, value.dtype, (count,), model)
        columns = place.step * np.arange(value.shape[1])
        array = None if flat is None else flat[np.array(place.rows)[:, None] + columns]
    if array is None or not place.form:
        return array
    logarithm: np.ndarray = np.log(-array if place.form == "log of the negative" else array)
    return logarithm


def unfolded(parameters: Mapping[str, Parameter], roles: Roles, model: Path, taken: set[str]) -> dict[str, Folded]:
    """Tensors of a file, by name, that are computed from parameters, whose names are none of `taken`."""
    if roles.stated is not None:
        return {}
    trained = {name: each for name, each in parameters.items() if each.trainable and _is_stored(each)}
    found = _Folds(trained, roles, model, taken)
    copies = dict(found.signed() if roles.signature else found.lifted())
    bases = {
        name: folded
        for name, each in parameters.items()
        if name not in copies and _is_stored(each) and (folded := found.base(each)) is not None
    }
    return bases | copies


def _is_stored(parameter: Parameter) -> bool:
    return isinstance(parameter.storage, FileSlice) and bool(parameter.value.elements)


def _place(parameter: Parameter) -> FileSlice:
    assert isinstance(parameter.storage, FileSlice)
    return parameter.storage


@dataclass(frozen=True, slots=True)
class _Folds:
    parameters: Mapping[str, Parameter]
    roles: Roles
    model: Path
    taken: set[str]
    """Names that no parameter can be given."""

    def numbers(self, parameter: Parameter) -> np.ndarray | None:
        value = parameter.value
        return sliced_numbers(_place(parameter), value.dtype, value.shape, self.model)

    def signed(self) -> Iterator[tuple[str, Folded]]:
        """Copies of a parameter, as torch's signature tells what a tensor was folded from."""
        signature = self.roles.signature
        first = {name: each for name, each in self.parameters.items() if name in signature.parameters}
        for name, each in self.parameters.items():
            if name in signature.parameters:
                folded = self._complemented(each, first) if name in signature.folded else None
                if folded is not None:
                    yield name, folded
                continue
            origins = signature.origins(name)
            bases = [first[origin] for origin in origins if origin in first]
            if len(origins) == 1 and not bases:
                first[origins[0]] = each
            for base in bases:
                steps = self.steps(base, each)
                if steps is not None:
                    yield name, Folded(each.value, base.value.name, steps)
                    break

    def _complemented(self, copy: Parameter, named: Mapping[str, Parameter]) -> Folded | None:
        """`copy`, told apart from another fold, as 1 minus a parameter: of several in a new model that hold the same
        numbers, the one that is read last before it.
        """
        numbers = self.numbers(copy)
        if numbers is None or is_uniform(numbers):
            return None
        read = {name: place for place, name in enumerate(self.roles.uses.readers)}
        place = read.get(copy.value.name, 0)
        before = [each for each in named.values() if read.get(each.value.name, place) < place]
        for base in sorted(before, key=lambda each: -read[each.value.name]):
            steps = self.steps(base, copy) if base.value.shape == copy.value.shape else None
            if steps and steps[0].operator == "Sub":
                return Folded(copy.value, base.value.name, steps)
        return None

    def lifted(self) -> Iterator[tuple[str, Folded]]:
        """Copies that torch's older exporter folded, known by their numbers: those of another tensor, moved."""
        groups: dict[tuple[DType, int, bytes], list[Parameter]] = {}
        complements: dict[tuple[DType, int, bytes], list[Parameter]] = {}
        if not any(LIFTED.fullmatch(name) for name in self.parameters):
            return
        for each in self.parameters.values():
            seen = len(each.value.shape) > 1 and each.value.bytes <= LARGEST
            array = self.numbers(each) if seen else None
            if array is not None:
                # Moving elements keeps the first and the last where they are.
                ends = np.array((array[(0,) * array.ndim], array[(-1,) * array.ndim]))
                size = each.value.dtype, each.value.elements
                groups.setdefault((*size, ends.tobytes()), []).append(each)
                if not LIFTED.fullmatch(each.value.name):
                    complements.setdefault((*size, (1 - ends).tobytes()), []).append(each)
        for key, group in groups.items():
            bases = list(complements.get(key, ()))
            # What a module names comes first: the others are copies of it.
            for each in sorted(group, key=lambda one: bool(LIFTED.fullmatch(one.value.name))):
                name = each.value.name
                for base in bases if LIFTED.fullmatch(name) else ():
                    steps = self.steps(base, each) if self._may_be_one(base.value.name, name) else None
                    if steps is not None:
                        yield name, Folded(each.value, base.value.name, steps)
                        break
                else:
                    bases.append(each)

    def _may_be_one(self, base: str, copy: str) -> bool:
        """True if equal numbers are no accident: a module's own tensor, or the same module called again."""
        if not LIFTED.fullmatch(base):
            return True
        readers = self.roles.uses.readers
        return {scope_of(node) for node, _ in readers.get(base, ())} == {
            scope_of(node) for node, _ in readers.get(copy, ())
        }

    def steps(self, base: Parameter, copy: Parameter) -> tuple[Step, ...] | None:
        """The operators that make `copy` of `base`, by their numbers; None where none do."""
        if base.value.dtype is not copy.value.dtype or copy.value.bytes > LARGEST:
            return None
        first, second = self.numbers(base), self.numbers(copy)
        if first is None or second is None or (is_uniform(first) and not self.roles.signature):
            return None
        if first.size == second.size:
            complement = first.shape == second.shape and np.array_equal(1 - first, second)
            one = Step("Sub", second.shape, operand=np.ones((), first.dtype))
            return (one,) if complement else _moved(first, second)
        if first.size > second.size or first.ndim > second.ndim:
            return None
        padded = (1,) * (second.ndim - first.ndim) + first.shape
        fits = all(have in (1, want) for have, want in zip(padded, second.shape, strict=True))
        if fits and np.array_equal(np.broadcast_to(first, second.shape), second):
            return (Step("Expand", second.shape),)
        return None

    def base(self, parameter: Parameter) -> Folded | None:
        """How a tensor that is no copy is computed from a parameter of another form or name; None where it is one."""
        value, origins = parameter.value, self.roles.signature.origins(parameter.value.name)
        folded = self._in_form(parameter)
        multiplied = self.roles.signature.multiplied(value.name)
        if value.name in origins or len(origins) != 1 or origins[0] in self.taken or multiplied:
            return folded
        # It goes by the module's own name.
        self.taken.add(origins[0])
        source = parameter if folded is None else folded.source
        assert isinstance(source, Parameter)
        named = replace(source, value=replace(source.value, name=origins[0]))
        return Folded(value, named, () if folded is None else folded.steps)

    def _in_form(self, parameter: Parameter) -> Folded | None:
        """How a tensor is computed from a parameter of another form."""
        value = parameter.value
        if value.bytes > LARGEST_LOOK or not value.dtype.is_floating or (array := self.numbers(parameter)) is None:
            return None
        if len(value.shape) < 2 or (self.roles.uses.is_weight(value.name) and not self._signed_lookup(value.name)):
            return self._logarithm(parameter, array)
        if (masked := self._masked(parameter, array)) is not None:
            return masked
        if self._may_be_expanded(value, array) and all(np.array_equal(array[0], row) for row in array[1:]):
            return self._of_row(parameter, array, 0, Step("Expand", value.shape))
        return self._looked_up(parameter, array) or self._logarithm(parameter, array)

    def _looked_up(self, parameter: Parameter, array: np.ndarray) -> Folded | None:
        """The rows that a tensor holds several times; None where it may not come from a lookup."""
        name = parameter.value.name.removesuffix(ROW)
        if not parameter.trainable or is_uniform(array):
            return None
        if self.roles.signature:
            possible = self._signed_lookup(name)
        else:
            possible = bool(LIFTED.fullmatch(name)) and sum(extent > 1 for extent in array.shape) > 2
        return _looked_up(parameter, array) if possible else None

    def _signed_lookup(self, name: str) -> bool:
        """True if the signature says that rows of a parameter may stand several times in a tensor."""
        return not REPEATS.isdisjoint(self.roles.signature.operators(name))

    def _masked(self, parameter: Parameter, array: np.ndarray) -> Folded | None:
        """A table to which the exporter added a mask: one row of the first axis, and what hides positions from it.

        Shifted windows (Swin) add 0 or -100 to the same biases. Some row must be without a mask, or nothing tells the
        biases that it hides.
        """
        operators = self.roles.signature.operators(parameter.value.name)
        if not parameter.trainable or len(array) < 2 or "masked_fill" not in operators:
            return None
        plain = int(np.argmax(array.reshape(len(array), -1).min(axis=1)))
        row = array[plain : plain + 1]
        mask = np.round(array - row)
        if not mask.any() or float(mask.min()) > MASKED or not np.array_equal(row + mask, array):
            return None
        for axis in range(1, mask.ndim):
            first = mask.take([0], axis)
            mask = first if np.array_equal(np.broadcast_to(first, mask.shape), mask) else mask
        return self._of_row(parameter, array, plain, Step("Add", parameter.value.shape, operand=mask))

    def _of_row(self, parameter: Parameter, array: np.ndarray, at: int, step: Step) -> Folded:
        """A tensor that `step` makes of one row of its first axis, which may hold rows of a table."""
        value, place = parameter.value, _place(parameter)
        length = place.length // len(array)
        row = replace(
            parameter,
            value=Value(f"{value.name}{ROW}", value.dtype, (1, *value.shape[1:])),
            storage=replace(place, offset=place.offset + at * length, length=length),
        )
        inner = self._looked_up(row, array[at : at + 1])
        return Folded(value, row, (step,)) if inner is None else replace(inner, value=value, steps=(*inner.steps, step))

    def _may_be_expanded(self, value: Value, array: np.ndarray) -> bool:
        """True if equal rows may come from an expansion along the samples, rather than from a new model."""
        if value.shape[0] < 2:
            return False
        if self.roles.signature:
            return self._signed_lookup(value.name)
        wide = len(value.shape) > (2 if self.roles.from_torch else 1)
        return wide and value.shape[0] in self.roles.samples and not is_uniform(array)

    def _logarithm(self, parameter: Parameter, array: np.ndarray) -> Folded | None:
        """The parameter whose exponential, perhaps negated, the exporter computed."""
        operators = self.roles.signature.operators(parameter.value.name)
        if "exp" not in operators or not parameter.trainable:
            return None
        value, place = parameter.value, _place(parameter)
        steps: tuple[Step, ...] = (Step("Exp", value.shape),)
        form = "log"
        if not (array > 0).all():
            if not (array < 0).all() or "neg" not in operators:
                return None
            steps, form = (*steps, Step("Neg", value.shape)), "log of the negative"
        storage = FoldedSlice(place.file, place.offset, place.length, form=form)
        return Folded(
            value, replace(parameter, value=replace(value, name=f"{value.name}{LOGARITHM}"), storage=storage), steps
        )


def _moved(first: np.ndarray, second: np.ndarray) -> tuple[Step, ...] | None:
    """The transposition and reshaping that make the second of the first."""
    flat = second.reshape(-1)
    shape = (Step("Reshape", second.shape),)
    if _is_equal(first, flat):
        return () if first.shape == second.shape else shape
    axes = [axis for axis, extent in enumerate(first.shape) if extent > 1]
    if len(axes) > MOST_AXES:
        return None
    for order in itertools.permutations(axes):
        # Axes of one element stay where they are.
        places = iter(order)
        whole = tuple(next(places) if extent > 1 else axis for axis, extent in enumerate(first.shape))
        moved = first.transpose(whole)
        if _is_equal(moved, flat):
            turned = (Step("Transpose", moved.shape, whole),)
            return turned if moved.shape == second.shape else (*turned, *shape)
    return None


def _is_equal(array: np.ndarray, flat: np.ndarray) -> bool:
    """Return True if `array`, read row by row, has the elements of `flat`.

    A sample of the elements is compared first, because most pairs differ there already.
    """
    array = np.atleast_1d(array)
    sampled = np.linspace(0, flat.size - 1, min(SAMPLED, flat.size)).astype(np.int64)
    if not np.array_equal(array[np.unravel_index(sampled, array.shape)], flat[sampled]):
        return False
    rows = max(1, BLOCK * len(array) // array.size)
    width = array.size // len(array)
    return all(
        np.array_equal(array[start : start + rows].reshape(-1), flat[start * width : (start + rows) * width])
        for start in range(0, len(array), rows)
    )


def _looked_up(parameter: Parameter, array: np.ndarray) -> Folded | None:
    """The rows of a table that an exporter looked up at fixed places; None where no row stands twice.

    Of several axes along which rows do, the one that leaves the smallest table.
    """
    value, place = parameter.value, _place(parameter)
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
    order = np.argsort(first)  # Rows in the order in which they stand.
    rank = np.argsort(order)
    others = [at for at in range(len(value.shape)) if at != axis]
    outer = tuple(value.shape[at] for at in others)
    strides = [math.prod(value.shape[at + 1 :]) for at in range(len(value.shape))]
    places = np.unravel_index(first[order], outer)
    begins = np.asarray(sum(index * strides[at] for at, index in zip(others, places, strict=True)))
    width = value.shape[axis]
    table = Value(f"{value.name}{ROWS}", value.dtype, (len(first), width))
    stored = FoldedSlice(place.file, place.offset, place.length, tuple(begins.tolist()), strides[axis])
    gathered = rank[inverse].reshape(outer).astype(np.int64)
    steps: tuple[Step, ...] = (Step("Gather", (*outer, width), operand=gathered),)
    last = len(others)
    if axis != last:
        steps = (*steps, Step("Transpose", value.shape, (*range(axis), last, *range(axis, last))))
    return Folded(value, replace(parameter, value=table, storage=stored), steps)
