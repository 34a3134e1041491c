"""Whether a row's notation is true: a node computed in parts, along each of its axes, gives what
the whole gives.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch

from autopipe.backends.torch.codegen.stage import emit_forward
from autopipe.backends.torch.runtime.random_numbers.random_streams import RandomStreams
from autopipe.backends.torch.runtime.state.running_statistics import RunningStatistics
from autopipe.ir.graph import Constant, Graph, Node
from autopipe.ir.layout import mesh_axes_of
from autopipe.ir.ops import OPERATORS, qualified_name, signature_of, space_of
from autopipe.ir.ops.operator import Signature
from autopipe.ir.placement import Split
from autopipe.ir.program import Compute, StageCode
from autopipe.ir.space import Axis, AxisKind, Space
from tests.conformance.adapter import forward_of, to_tensor
from tests.ir.ops.cutting import Cut
from tests.ir.ops.meeting import Member, Told, together

Tensors = tuple[torch.Tensor, ...]

_FIXED = {
    "SoftmaxCrossEntropyLoss": (2,), "NegativeLogLikelihoodLoss": (2,), "LinearCrossEntropy": (2,),
    "BatchNormalization": (3, 4),
}  # fmt: skip
"""Floating operands through which torch lets no gradient."""


@dataclass(frozen=True, slots=True)
class Use:
    """One node with the numbers of its operands, by name."""

    graph: Graph
    node: Node
    arrays: dict[str, np.ndarray]

    @property
    def space(self) -> Space:
        """The node's iteration space."""
        return space_of(self.graph, self.node)


MOST_PARTS = 32
"""Every part is a thread: an extent of 997 would be that many."""


def divisible_axes(space: Space) -> Iterator[Axis]:
    """Axes that the row says can be split, long enough and into few parts."""
    able = (axis for axis in space.axes if axis.kind is not AxisKind.UNSPLITTABLE and axis.size > 1)
    return (axis for axis in able if smallest_factor(axis.size) <= MOST_PARTS)


def smallest_factor(extent: int) -> int:
    """The smallest degree above one that divides an extent."""
    return next(factor for factor in range(2, extent + 1) if extent % factor == 0)


def computed(
    signature: Signature,
    tensors: dict[str, torch.Tensor],
    splits: tuple[Split, ...] = (),
    member: Member | None = None,
) -> Tensors:
    """The node's results from emitted text, as a member of a group where it is one."""
    constants = [
        Constant(value, array)
        for value, array in zip(signature.operands, signature.constants, strict=True)
        if value is not None and array is not None
    ]
    constants = list({each.value.name: each for each in constants}.values())
    known = {each.value.name for each in constants}
    inputs = {
        value.name: value
        for value in signature.operands
        if value is not None and value.name not in known
    }
    outputs = tuple(value for value in signature.results if value is not None)
    group = math.prod(split.degree for split in splits)
    stage = StageCode(
        stage=0,
        devices=tuple(range(group)),
        inputs=tuple(inputs.values()),
        outputs=outputs,
        parameters=(),
        constants=tuple(enumerate(constants)),
        operations=(Compute(0, signature, splits, mesh_axes_of(splits, group)),),
    )
    held = {f"c{index}": to_tensor(each.array) for index, each in enumerate(constants)}
    random = RandomStreams(torch.device("cpu"), 0 if member is None else member.position)
    place = SimpleNamespace(
        device=torch.device("cpu"),
        group=member,
        random=random,
        training=True,
        running=RunningStatistics(),
        **held,
    )
    results: Tensors = forward_of(emit_forward(stage).text)(
        place, *(tensors[name] for name in inputs)
    )
    for value, result in zip(outputs, results, strict=True):
        assert tuple(result.shape) == value.shape
    return results


def check(use: Use, rtol: float = 1e-5, atol: float = 1e-6) -> int:
    """Assert that every split that the notation allows is true; returns the number of axes
    checked.
    """
    axes = list(divisible_axes(use.space))
    for axis in axes:
        check_splits(use, (Split(axis.name, smallest_factor(axis.size)),), rtol, atol)
    return len(axes)


def check_pairs(use: Use, rtol: float = 1e-5, atol: float = 1e-6) -> int:
    """Assert that splits along any two axes at once are true; returns the number of pairs
    checked.
    """
    pairs = list(itertools.permutations(divisible_axes(use.space), 2))
    for axes in pairs:
        check_splits(
            use, tuple(Split(axis.name, smallest_factor(axis.size)) for axis in axes), rtol, atol
        )
    return len(pairs)


def check_splits(
    use: Use, splits: tuple[Split, ...], rtol: float = 1e-5, atol: float = 1e-6
) -> None:
    """Assert that parts make up the whole, their gradients too, and that they tell one another what
    the row says.

    The parts' gradients of an operand add up to the gradient of the whole, as those of ranks do.
    """
    signature = signature_of(use.graph, use.node)
    space = use.space
    row = OPERATORS[qualified_name(use.node)]
    tensors = {name: to_tensor(array) for name, array in use.arrays.items()}
    whole = _run(signature, tensors, Cut(space, (), 0), None, row.differentiable)
    cuts = [
        Cut(space, splits, position)
        for position in range(math.prod(split.degree for split in splits))
    ]
    parts = together(
        [
            lambda member, cut=cut: _run(signature, tensors, cut, member, row.differentiable)  # type: ignore[misc]
            for cut in cuts
        ]
    )
    where = f"split {' '.join(map(str, splits))} of {space}"

    def compare(found: torch.Tensor, expected: torch.Tensor, what: str, more: float = 0.0) -> None:
        if expected.is_floating_point() and not _flows(expected):
            found = found.float()
            expected = expected.float()
        torch.testing.assert_close(
            found,
            expected,
            rtol=rtol,
            atol=atol + more,
            equal_nan=True,
            msg=lambda text: f"{what}, {where}: {text}",
        )

    words = [each for each in space.results if each is not None]
    for index, word in enumerate(words):
        joined = torch.zeros_like(whole.results[index])
        for cut, part in zip(cuts, parts, strict=True):
            cut.put(part.results[index].to(joined.dtype), word, joined)
            shown = cut.shown(whole.results[index], word)
            if shown is not None:
                compare(part.results[index], shown, f"rank {cut.position}'s result {index}")
        compare(joined, whole.results[index], f"result {index}")
    for name, gradient in whole.gradients.items():
        # Elements of a gradient are sums that may cancel: they are held against the whole tensor's
        # size.
        size = (
            float(gradient.double().nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt())
            if gradient.numel()
            else 0.0
        )
        total = torch.stack([part.gradients[name] for part in parts]).sum(0)
        compare(total, gradient, f"gradient of {name}", rtol * size)
    said = row.statistics(signature, space, {split.axis: split.degree for split in splits})
    wanted = Counter(
        Told(each.kind, each.bytes, each.backward) for each in said for _ in range(each.times)
    )
    for part in parts:
        assert part.told == wanted, where


def _flows(tensor: torch.Tensor) -> bool:
    """True if gradients may flow to a tensor: numbers of 8 bits are stored, not computed with."""
    return tensor.is_floating_point() and tensor.element_size() > 1


@dataclass(frozen=True, slots=True)
class _Ran:
    """A node's results, the gradients of its operands by name, and what it told its group."""

    results: Tensors
    gradients: dict[str, torch.Tensor]
    told: Counter[Told]


def _run(
    signature: Signature,
    tensors: dict[str, torch.Tensor],
    cut: Cut,
    member: Member | None,
    differentiable: bool,
) -> _Ran:
    """Run a part of the node, and take the derivative of a weighted sum of its results."""
    fixed = {
        signature.node.inputs[place]
        for place in _FIXED.get(signature.node.op, ())
        if place < len(signature.operands)
    }
    leaves = {
        name: tensor.clone().requires_grad_(differentiable and _flows(tensor) and name not in fixed)
        for name, tensor in tensors.items()
    }
    local, shards = cut.signature(signature, leaves)
    results = computed(local, shards, cut.splits, member)
    wholes = [value for value in signature.results if value is not None]
    words = [each for each in cut.space.results if each is not None]
    losses = []
    for value, word, result in zip(wholes, words, results, strict=True):
        weights = torch.linspace(0.5, 1.5, value.elements, dtype=torch.float64).reshape(value.shape)
        if result.requires_grad and _flows(result):
            losses.append((result * cut.shard(weights, word) * cut.weight(word)).sum())
    wanted = [name for name, leaf in leaves.items() if leaf.requires_grad]
    gradients: dict[str, torch.Tensor] = {}
    if losses and wanted:
        found = torch.autograd.grad(
            sum(losses), [leaves[name] for name in wanted], materialize_grads=True
        )  # type: ignore[arg-type]
        gradients = dict(zip(wanted, found, strict=True))
    told = Counter(() if member is None else member.log)
    return _Ran(tuple(result.detach() for result in results), gradients, told)
