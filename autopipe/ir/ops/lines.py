"""Pieces that lines of notation are put together from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopipe.ir.ops.row import NotationLine, Signature


def spell(operands: Iterable[Sequence[str] | None], results: Iterable[Sequence[str] | None]) -> NotationLine:
    """A line from the words of each tensor's dimensions; None where a tensor is absent."""

    def side(tensors: Iterable[Sequence[str] | None]) -> str:
        return ", ".join("?" if words is None else " ".join(words) for words in tensors)

    return NotationLine(f"{side(operands)} -> {side(results)}")


def names(rank: int, prefix: str = "d") -> list[str]:
    """One axis a dimension: d0 d1 …"""
    return [f"{prefix}{axis}" for axis in range(rank)]


def unindexed(shape: Sequence[int]) -> list[str]:
    """Dimensions that no axis indexes."""
    return ["1"] * len(shape)


def marked(words: Sequence[str], axes: Iterable[int], mark: str) -> list[str]:
    """`words` with `mark` behind those at `axes`."""
    chosen = set(axes)
    return [word + mark if axis in chosen and word != "1" else word for axis, word in enumerate(words)]


def replaced(words: Sequence[str], axes: Iterable[int], word: str = "1") -> list[str]:
    """`words` with those at `axes` replaced."""
    chosen = set(axes)
    return [word if axis in chosen else each for axis, each in enumerate(words)]


def aligned(shape: Sequence[int], result: Sequence[int], words: Sequence[str]) -> list[str]:
    """The words of an operand that broadcasts to `result`, whose words are `words`: trailing dimensions aligned."""
    offset = len(result) - len(shape)
    return [words[offset + axis] if extent == result[offset + axis] else "1" for axis, extent in enumerate(shape)]


def opaque(signature: Signature) -> NotationLine:
    """No axis at all: an operator that cannot be split."""
    return spell(
        [None if value is None else unindexed(value.shape) for value in signature.operands],
        [None if value is None else unindexed(value.shape) for value in signature.results],
    )


def with_whole(signature: Signature, axes: Iterable[int]) -> NotationLine:
    """The first operand and all results have one shape and stay whole along `axes`; other operands are unindexed."""
    words = names(len(signature.operand(0).shape))
    operands: list[Sequence[str] | None] = [marked(words, axes, "!")]
    operands += [None if value is None else unindexed(value.shape) for value in signature.operands[1:]]
    return spell(operands, [None if value is None else words for value in signature.results])


def positive(axis: int, rank: int) -> int:
    """An axis counted from the front, given one that may count from the back."""
    return axis + rank if axis < 0 else axis


def axes_of(signature: Signature, operand: int) -> tuple[int, ...] | None:
    """Axes given as attribute `axes` or, in later opsets, as a static operand; counted from the front.

    Those of operators that add dimensions count in the result. None where neither is given.
    """
    rank = max(len(signature.operand(0).shape), len(signature.result().shape))
    array = signature.constant(operand)
    if array is not None:
        given = tuple(int(axis) for axis in array.reshape(-1))
    elif signature.node.has("axes"):
        given = signature.node.integers("axes")
    else:
        return None
    return tuple(positive(axis, rank) for axis in given)
