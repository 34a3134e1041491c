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

from autopipe.ir.graph import DType, FileSlice, Fill, FoldedSlice, Parameter
from autopipe.passes.frontend.read import read_model
from tests.exports.traced import Traced, file_of, module_of
from tests.exports.with_loss import Tensors

UNREAD = "rows that no position reads are not in the file"
"""Said where all that lacks has no gradient."""
NOT_EXPORTED: dict[tuple[str, str], str] = {}
"""Why an exporter does not export a model."""
EXPLAINED = (
    ("", "*", f"*{UNREAD}"),
    ("its gradient is that of the sum", "gemma*", "* is 1 + it"),
    ("the exporter computes weight normalization", "*-dynamo-*", "*.parametrizations.weight.original*"),
    ("the exporter computes weight normalization", "*-dynamo-*", "trained here only: mul (*)"),
)
"""Differences that are no mistakes: why, where the words do not say it, in which exports, and in which words."""


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
    ours = trained_here(file_of(traced))
    return Comparison(_elements(theirs), _elements(ours), _differences(theirs, ours, gradients))


def unexplained(traced: Traced, differences: Sequence[str]) -> tuple[list[str], list[str]]:
    """The differences that nothing explains, and those that `EXPLAINED` does, with the reason."""
    known = [(why, words) for why, names, words in EXPLAINED if fnmatchcase(traced.name, names)]
    wrong, explained = [], []
    for each in differences:
        why = next((why for why, words in known if fnmatchcase(each, words)), None)
        if why is None:
            wrong.append(each)
        else:
            explained.append(f"{each}, {why}" if why else each)
    return wrong, explained


def _elements(tensors: Mapping[str, np.ndarray]) -> int:
    return sum(each.size for each in tensors.values())


def trained_here(path: Path) -> dict[str, np.ndarray]:
    """The numbers that each parameter that a plan of the file would train starts with."""
    graph = read_model(path).graph
    return {each.value.name: _numbers(each, path) for each in graph.parameters if each.trainable}


def _numbers(parameter: Parameter, path: Path) -> np.ndarray:
    place = parameter.storage
    if isinstance(place, Fill):
        return np.full(parameter.value.shape, place.value, np.float32)
    assert isinstance(place, FileSlice), f"{parameter.value.name} is drawn at random"
    assert parameter.value.dtype is DType.FLOAT32, parameter.value
    file = path.parent / place.file if place.file else path
    numbers = np.fromfile(file, "<f4", place.length // 4, offset=place.offset)
    if not isinstance(place, FoldedSlice):
        return numbers
    if place.rows:
        columns = place.step * np.arange(parameter.value.shape[1])
        numbers = numbers[np.array(place.rows)[:, None] + columns]
    return np.log(-numbers if place.form == "log of the negative" else numbers) if place.form else numbers


def _differences(
    theirs: Mapping[str, np.ndarray], ours: Mapping[str, np.ndarray], gradients: Mapping[str, np.ndarray]
) -> tuple[str, ...]:
    """What does not match, in words that name the tensors."""
    found = []
    groups, left, extra = paired(theirs, ours)
    for names, places in groups:
        whole = np.concatenate([theirs[name].ravel() for name in names])
        here = np.concatenate([ours[name].ravel() for name in places])
        lacking = np.concatenate([gradients[name].ravel() for name in names])[~np.isin(whole, here)]
        if same(whole + 1, here):
            found.append(f"{names[0]}: here {places[0]} is 1 + it")
        elif whole.size != here.size:
            unread = f", {UNREAD}" if whole.size == here.size + lacking.size and not lacking.any() else ""
            found.append(f"{', '.join(names)}: {whole.size}, here {', '.join(places)}: {here.size}{unread}")
    for name in extra:
        of = next((each for each in sorted(theirs) if holds(theirs[each], ours[name])), None)
        found.append(f"trained here only: {name} ({ours[name].size})" + (f", a copy of {of}" if of else ""))
    return (*found, *(f"not trained here: {name} ({theirs[name].size})" for name in left))


Group = tuple[tuple[str, ...], tuple[str, ...]]
"""Names of torch's parameters and of those here that hold the same numbers."""


def paired(
    theirs: Mapping[str, np.ndarray], ours: Mapping[str, np.ndarray]
) -> tuple[list[Group], list[str], list[str]]:
    """Tensors that hold the same numbers; names of torch's and of ours that are left.

    Mostly one of each. ONNX's recurrent operators take all gates, directions and biases of a layer in one tensor each,
    and exporters cut the weights of packed projections apart.
    """
    pairs = {name: name for name in theirs if name in ours and same(theirs[name], ours[name])}
    left = set(ours) - set(pairs)
    for name, array in sorted(theirs.items()):
        if name not in pairs:
            like = (each for form in (array, array + 1) for each in sorted(left) if same(form, ours[each]))
            other = next(like, None)
            if other is not None:
                pairs[name] = other
                left.remove(other)
    packed = list(_packed({name: theirs[name] for name in theirs if name not in pairs}, {n: ours[n] for n in left}))
    groups = [*(((name,), (other,)) for name, other in pairs.items()), *packed]
    taken = {name for names, _ in groups for name in names}, {name for _, names in groups for name in names}
    return groups, sorted(set(theirs) - taken[0]), sorted(set(ours) - taken[1])


def same(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two tensors hold the same numbers, whatever their order and the last bits of a logarithm taken back."""
    return one.size == other.size and np.allclose(np.sort(one, None), np.sort(other, None), rtol=1e-5, atol=1e-6)


def _packed(theirs: Mapping[str, np.ndarray], ours: Mapping[str, np.ndarray]) -> Iterator[Group]:
    """The connected components of tensors that hold most of each other's numbers."""
    groups = {(True, name): frozenset({(True, name)}) for name in theirs}
    groups |= {(False, name): frozenset({(False, name)}) for name in ours}
    for name, array in theirs.items():
        for other, numbers in ours.items():
            if holds(array, numbers) or holds(numbers, array):
                together = groups[True, name] | groups[False, other]
                groups.update(dict.fromkeys(together, together))
    for group in sorted({each for each in groups.values() if len(each) > 1}, key=sorted):
        yield (
            tuple(sorted(name for is_torchs, name in group if is_torchs)),
            tuple(sorted(name for is_torchs, name in group if not is_torchs)),
        )


def holds(whole: np.ndarray, part: np.ndarray) -> bool:
    """Whether most numbers of one tensor are numbers of another; one number repeated says nothing."""
    numbers = np.unique(part[part != 0])
    return numbers.size > min(2, part.size - 1) and float(np.isin(numbers, whole).mean()) > 0.5
