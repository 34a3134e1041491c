"""The shape of a row: everything the compiler knows of one operator.

A row is data and small pure functions. How an operator is spelled in PyTorch is not here: see the backends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from autopipe.ir.dtype import DType
from autopipe.ir.errors import ModelError
from autopipe.ir.graph import Graph, Node, Value
from autopipe.ir.ops.statistics import Statistic
from autopipe.ir.space import NotationError, Space, parse


@dataclass(frozen=True, slots=True)
class Signature:
    """One use of an operator: the node, the types of what it reads and writes, and what is known while compiling.

    `operands[i]` and `results[i]` are None where an optional tensor is absent. `constants[i]` holds an operand's
    numbers where they are known, else None. `opset` gives the "" domain's meaning.
    """

    node: Node
    operands: tuple[Value | None, ...]
    results: tuple[Value | None, ...]
    constants: tuple[np.ndarray | None, ...]
    opset: int

    def operand(self, index: int) -> Value:
        """Operand `index`, which must be present."""
        value = self.operands[index]
        assert value is not None, f"{self.node.op} lacks operand {index}"
        return value

    def result(self, index: int = 0) -> Value:
        """Result `index`, which must be present."""
        value = self.results[index]
        assert value is not None, f"{self.node.op} lacks result {index}"
        return value

    def present(self, index: int) -> bool:
        """True if operand `index` is present."""
        return index < len(self.operands) and self.operands[index] is not None

    def constant(self, index: int) -> np.ndarray | None:
        """The numbers of operand `index` where they are known while compiling."""
        return self.constants[index] if index < len(self.constants) else None


def signature_of(graph: Graph, node: Node) -> Signature:
    """The signature of `node` in `graph`."""
    constants = [graph.constant(name) if name else None for name in node.inputs]
    return Signature(
        node=node,
        operands=tuple(graph.type_of(name) if name else None for name in node.inputs),
        results=tuple(graph.type_of(name) if name else None for name in node.outputs),
        constants=tuple(None if each is None else each.array for each in constants),
        opset=graph.opset,
    )


@dataclass(frozen=True, slots=True)
class NotationLine:
    """A line of notation (see `autopipe.ir.space`), with extents of axes that shapes alone do not tell."""

    text: str
    extents: tuple[tuple[str, int], ...] = ()
    fill: float = 0.0
    """Value read outside of a tensor by windows."""


def no_flops(signature: Signature, space: Space) -> float:
    """For operators that only move data."""
    return 0.0


Statistics = Callable[[Signature, Space, Mapping[str, int]], tuple[Statistic, ...]]
"""Function from a use's signature and space, and the degrees of its splits by axis, to its statistics."""


def no_statistics(signature: Signature, space: Space, degrees: Mapping[str, int]) -> tuple[Statistic, ...]:
    """For operators that tell other devices nothing."""
    return ()


def separates_samples(signature: Signature) -> bool:
    """For operators that never mix samples."""
    return False


@dataclass(frozen=True, slots=True)
class Operator:
    """Row of the operator table."""

    name: str
    """Operator type; of other domains with the domain in front: `com.microsoft.Gelu`."""
    notation: Callable[[Signature], NotationLine]
    """Its line of notation for one use."""
    kind: str
    """Class for costs: matmul, convolution, recurrent, normalization, reduction, elementwise, memory (copies), or
    view (neither work nor traffic: the result aliases the operand)."""
    flops: Callable[[Signature, Space], float] = no_flops
    """Floating-point operations of one forward evaluation; a multiply-add counts two."""
    backward: float = 1.0
    """Operations of backward, as a multiple of forward (2 for products: one for each operand's gradient)."""
    keeps: tuple[str, ...] = ()
    """Tensors that backward needs: "0", "1" … operands, ">0" … results, "*" all operands, "mask" one byte an element of
    the first result, "places" eight (where a maximum was). Values kept by several consumers count once; parameters and
    constants are kept anyway.
    """
    static: tuple[int, ...] = ()
    """Operands whose numbers must be known while compiling (Reshape's shape)."""
    random: bool = False
    """Whether it draws numbers: anew in each evaluation, and others for each node."""
    differentiable: bool = True
    """True if gradients flow from the results to floating operands."""
    mixes_samples: Callable[[Signature], bool] = separates_samples
    """True if one use's result of a sample depends on other samples of the batch in a way that a micro-batch changes
    (BatchNormalization in training mode, a mean loss that ignores some labels); the frontend warns.
    """
    statistics: Statistics = no_statistics
    """Exchanges of the operator itself when it is split along joint axes, in their order: from the whole tensors'
    signature, its space, and all degrees by axis.
    """
    types: frozenset[DType] = field(default_factory=lambda: frozenset(DType))
    """Element types the operator can take on all backends."""
    weights: tuple[int, ...] = ()
    """Operands whose gradient is a product (or, of a lookup, a scatter) of its own. Where one is a parameter, a split
    backward leaves its gradient to the second half."""

    def space(self, signature: Signature) -> Space:
        """The iteration space of one use.

        Raises ModelError where the node's attributes make no sense for its operands, as a file may state any, and
        NotationError, a ModelError, where the row does not fit the tensors.
        """
        try:
            line = self.notation(signature)
        except (ArithmeticError, AssertionError, LookupError, ValueError) as error:
            shapes = ", ".join("absent" if value is None else str(value.shape) for value in signature.operands)
            raise ModelError(
                f"{self.name} cannot take operands {shapes} with these attributes", where=repr(signature.node.name)
            ) from error
        try:
            return parse(
                line.text,
                tuple(None if value is None else value.shape for value in signature.operands),
                tuple(None if value is None else value.shape for value in signature.results),
                dict(line.extents),
                line.fill,
            )
        except NotationError as error:
            raise NotationError(
                f"{self.name} does not fit its tensors: {error.message}", where=repr(signature.node.name)
            ) from error


def notated(text: str) -> Callable[[Signature], NotationLine]:
    """The same line for every use."""
    return lambda signature: NotationLine(text)


def per_point(coefficient: float) -> Callable[[Signature, Space], float]:
    """Operations: `coefficient` for each point of the iteration space."""
    return lambda signature, space: coefficient * space.points


def per_result(coefficient: float) -> Callable[[Signature, Space], float]:
    """Operations: `coefficient` for each element of the first result."""
    return lambda signature, space: coefficient * math.prod(signature.result().shape)
