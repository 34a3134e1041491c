"""The set of tensors that a plan would train, compared with the parameters of the module that was exported.

torch knows its parameters; the exported file has them renamed, folded, merged, copied and packed. They are matched by
name where the file kept it, else by their numbers, which hardly ever meet in two tensors of a trained model. In a fresh
model most numbers are ones and zeros, so that there only names and counts of elements are left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
from torch import nn

from autopipe.ir.graph import FileSlice, Fill, FoldedSlice, Parameter
from autopipe.passes.frontend.read import read_model
from tests.exports.traced import Traced, file_of, module_of
from tests.exports.with_loss import Tensors

UNREAD = "rows that no position reads are not in the file"
"""Said where all that lacks has no gradient."""
NOT_EXPORTED: dict[tuple[str, str], str] = {}
"""Why an exporter does not export a model."""
EXPLAINED: dict[str, tuple[str, ...]] = {
    UNREAD: ("*",),
}
"""Differences that are no mistakes, a part of their words each, and the names of exports where they may be."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Elements by name, and each difference in words."""

    torch: int
    here: int
    differences: tuple[str, ...]


def trained_by_torch(module: nn.Module, inputs: Tensors) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The parameters that the loss reaches, by the name of `named_parameters()`, and their gradients."""
    module.zero_grad()
    module(*inputs.values()).backward()
    numbers, gradients = {}, {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.grad is not None:
            numbers[name], gradients[name] = parameter.detach().numpy(), parameter.grad.numpy()
    return numbers, gradients


def compared(traced: Traced) -> Comparison:
    """What torch trains and what a plan of the exported file would."""
    theirs, gradients = trained_by_torch(*module_of(traced))
    path = file_of(traced)
    model = read_model(path)
    ours = {each.value.name: _numbers(each, path) for each in model.graph.parameters if each.trainable}
    differences = _differences(theirs, ours, gradients)
    return Comparison(_elements(theirs), _elements(ours), differences)


def unexplained(traced: Traced, differences: Sequence[str]) -> tuple[list[str], list[str]]:
    """The differences that nothing explains, and those that `EXPLAINED` does."""
    words = [word for word, names in EXPLAINED.items() if any(fnmatchcase(traced.name, name) for name in names)]
    explained = [each for each in differences if any(word in each for word in words)]
    return [each for each in differences if each not in explained], explained


def _elements(tensors: Mapping[str, np.ndarray]) -> int:
    return sum(each.size for each in tensors.values())


def _numbers(parameter: Parameter, path: Path) -> np.ndarray:
    """The numbers that a parameter starts with."""
    place = parameter.storage
    if isinstance(place, Fill):
        return np.full(parameter.value.shape, place.value, np.float32)
    assert isinstance(place, FileSlice), f"{parameter.value.name} is drawn at random"
    file = path.parent / place.file if place.file else path
    assert parameter.value.dtype.value == "float32", parameter.value
    numbers = np.fromfile(file, "<f4", place.length // 4, offset=place.offset)
    if isinstance(place, FoldedSlice):
        if place.rows:
            numbers = numbers[np.array(place.rows)[:, None] + place.step * np.arange(parameter.value.shape[1])]
        if place.form:
            numbers = np.log(-numbers if place.form == "log of the negative" else numbers)
    return numbers


def _differences(
    theirs: Mapping[str, np.ndarray], ours: Mapping[str, np.ndarray], gradients: Mapping[str, np.ndarray]
) -> tuple[str, ...]:
    """What does not match, in words that name the tensors."""
    pairs = _pairs(theirs, ours)
    known = set(pairs.values())
    left = {name: array for name, array in theirs.items() if name not in pairs}
    extra = {name: array for name, array in ours.items() if name not in known}
    found = []
    for torch_names, names in _packed(left, extra):
        whole = np.concatenate([left.pop(name).ravel() for name in torch_names])
        here = np.concatenate([extra.pop(name).ravel() for name in names])
        lacking = np.concatenate([gradients[name].ravel() for name in torch_names])[~np.isin(whole, here)]
        if whole.size != here.size:
            unread = f", {UNREAD}" if whole.size == here.size + lacking.size and not lacking.any() else ""
            found.append(f"{', '.join(torch_names)}: {whole.size}, here {', '.join(names)}: {here.size}{unread}")
    for name, array in sorted(extra.items()):
        of = next((each for each in sorted(theirs) if _holds(theirs[each], array)), None)
        found.append(f"trained here only: {name} ({array.size})" + (f", a copy of {of}" if of else ""))
    found += [f"not trained here: {name} ({array.size})" for name, array in sorted(left.items())]
    return tuple(found)


def _pairs(theirs: Mapping[str, np.ndarray], ours: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Tensors with the same numbers, in any order, first those of the same name."""
    pairs = {name: name for name in theirs if name in ours and _same(theirs[name], ours[name])}
    left = set(ours) - set(pairs)
    for name, array in sorted(theirs.items()):
        if name not in pairs:
            other = next((each for each in sorted(left) if _same(array, ours[each])), None)
            if other is not None:
                pairs[name] = other
                left.remove(other)
    return pairs


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two tensors hold the same numbers, whatever their order and the last bits of a logarithm taken back."""
    return one.size == other.size and np.allclose(np.sort(one, None), np.sort(other, None), rtol=1e-5, atol=1e-6)


def _packed(theirs: Mapping[str, np.ndarray], ours: Mapping[str, np.ndarray]) -> Iterator[tuple[list[str], list[str]]]:
    """Groups of tensors that hold each other's numbers.

    ONNX's recurrent operators take all gates, directions and biases of a layer in one tensor each, and exporters cut
    the weights of packed projections apart.
    """
    for group in _groups(theirs, ours):
        torch_names = sorted(name for name in group if name in theirs)
        yield torch_names, sorted(name.removeprefix(_OURS) for name in group if name not in theirs)


_OURS = "here: "


def _groups(theirs: Mapping[str, np.ndarray], ours: Mapping[str, np.ndarray]) -> Iterator[frozenset[str]]:
    """The connected components of more than one name; ours begin with `_OURS`."""
    groups = {name: frozenset({name}) for name in (*theirs, *(_OURS + name for name in ours))}
    for name, array in theirs.items():
        for other, numbers in ours.items():
            if _holds(array, numbers) or _holds(numbers, array):
                together = groups[name] | groups[_OURS + other]
                groups.update(dict.fromkeys(together, together))
    yield from sorted({group for group in groups.values() if len(group) > 1}, key=min)


def _holds(whole: np.ndarray, part: np.ndarray) -> bool:
    """Whether most numbers of one tensor are numbers of another; one number repeated says nothing."""
    numbers = np.unique(part[part != 0])
    return numbers.size > min(2, part.size - 1) and float(np.isin(numbers, whole).mean()) > 0.5
