"""Functions for the segments of a stage. A segment consists of operations that backward recomputes
together. Equal segments share a function.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopipe.backends.torch.codegen.block import Block, block_of, kind_of
from autopipe.backends.torch.codegen.layer_functions import Call, Function, function_name
from autopipe.backends.torch.codegen.statement import Statement


@dataclass(frozen=True, slots=True)
class SegmentBody:
    """The body of a segment (operations that backward recomputes together), with one statement per
    operator.
    """

    number: int
    statements: tuple[Statement, ...]
    arguments: tuple[str, ...]
    """Variables that the segment reads from outside."""
    flowing: tuple[str, ...]
    """Variables of its results through which gradients flow."""
    others: tuple[str, ...]
    """Variables of its other results."""

    @property
    def ends(self) -> tuple[str, ...]:
        """Variables that the segment's function gets and returns."""
        return (*self.arguments, *self.flowing, *self.others)


def segment_calls(
    segments: Sequence[SegmentBody], names: Mapping[str, str], used: set[str]
) -> list[Call]:
    """Return one call per segment, in order. Equal segments with parameters call one function; each
    other segment has a function of its own.

    `names` has the name in the model of each parameter and constant, such as `p.w3`. `used` has the
    function names that are taken, to which the new ones are added.
    """
    blocks = [block_of(each.statements, 0, len(each.statements)) for each in segments]
    by_form: dict[object, list[int]] = defaultdict(list)
    for index, (segment, block) in enumerate(zip(segments, blocks, strict=True)):
        by_form[_form_of(segment, block)].append(index)
    calls: dict[int, Call] = {}
    for equal in by_form.values():
        instances = tuple(_tokens_of(segments[index], blocks[index]) for index in equal)
        function = _function(segments[equal[0]], instances, names, used)
        calls |= {index: Call(function, instance) for instance, index in enumerate(equal)}
    return [calls[index] for index in range(len(segments))]


def _form_of(segment: SegmentBody, block: Block) -> object:
    """Return an object that is equal for segments that can share a function. Segments without a
    parameter (kind "w") do not share one, because the queue of deferred weight gradients
    distinguishes segments by their layer.
    """
    place = {token: index for index, token in enumerate(block.tokens)}
    has_parameter = any(kind_of(token) == "w" for token in block.tokens)
    if not has_parameter or any(name not in place for name in segment.ends):
        return segment.number
    ends = (segment.arguments, segment.flowing, segment.others)
    return (block.canonical, *(tuple(place[name] for name in each) for each in ends))


def _tokens_of(segment: SegmentBody, block: Block) -> tuple[str, ...]:
    """Return the distinct tokens of a segment. A segment may return one of its arguments that no
    statement reads, which has no token in the block.
    """
    return tuple(dict.fromkeys((*block.tokens, *segment.ends)))


def _function(
    first: SegmentBody,
    instances: tuple[tuple[str, ...], ...],
    names: Mapping[str, str],
    used: set[str],
) -> Function:
    """Return the function of equal segments. `first` is the first segment, and `instances` has the
    tokens of each one.
    """
    tokens = instances[0]
    is_shared = len(instances) > 1
    name = function_name(instances, names, used) if is_shared else f"segment_{first.number}"
    return Function(
        name,
        first.statements,
        instances,
        tuple(map(tokens.index, first.arguments)),
        tuple(map(tokens.index, (*first.flowing, *first.others))),
        len(first.flowing),
        is_shared,
    )
