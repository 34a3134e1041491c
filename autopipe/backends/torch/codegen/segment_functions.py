"""Functions that several equal segments of a stage share. A segment consists of operations that
backward recomputes together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopipe.backends.torch.codegen.block import (
    ARGUMENT_ORDER,
    Block,
    block_of,
    function_name,
    kind_of,
    local_names,
    rename_tokens,
)
from autopipe.backends.torch.codegen.statement import Statement, tuple_code, wrapped_call


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


@dataclass(frozen=True, slots=True)
class SegmentFunction:
    """A function that several segments share."""

    name: str
    text: str
    weights: Mapping[int, tuple[str, ...]]
    """For each segment that shares the function, by its number, the parameters, constants and
    random keys that its call passes.
    """


def fold_segments(
    segments: Sequence[SegmentBody], names: Mapping[str, str]
) -> list[SegmentFunction]:
    """Return one function for each set of two or more equal segments with parameters. Other
    segments keep a function of their own. `names` has the name in the model of each parameter and
    constant, such as `p.w3`.
    """
    found: list[SegmentFunction] = []
    used: set[str] = set()
    by_form: dict[object, list[tuple[SegmentBody, Block]]] = defaultdict(list)
    for segment in segments:
        block = block_of(segment.statements, 0, len(segment.statements))
        place = {token: index for index, token in enumerate(block.tokens)}
        if all(name in place for name in (*segment.arguments, *segment.flowing, *segment.others)):
            ends = (segment.arguments, segment.flowing, segment.others)
            form = (block.canonical, *(tuple(place[name] for name in each) for each in ends))
            by_form[form].append((segment, block))
    for equal in by_form.values():
        # Segments without a parameter (kind "w") do not share a function, because the runtime
        # identifies the segment of a call by its weights.
        if len(equal) > 1 and any(kind_of(token) == "w" for token in equal[0][1].tokens):
            found.append(_segment_function(equal, names, used))
    return found


def _segment_function(
    equal: Sequence[tuple[SegmentBody, Block]], names: Mapping[str, str], used: set[str]
) -> SegmentFunction:
    """Return the function that computes the segments in `equal`, which are equal except for their
    tokens. The parameters, constants and random keys are the elements of the function's argument
    `weights`, so that autograd does not take them for operands of the segment. `names` has the name
    in the model of each parameter and constant. `used` has the function names that are taken, to
    which the new name is added.
    """
    first, block = equal[0]
    blocks = [each for _, each in equal]
    held = [place for place, token in enumerate(block.tokens) if kind_of(token) != "x"]
    held.sort(key=lambda place: ARGUMENT_ORDER[kind_of(block.tokens[place])])
    inputs = [block.tokens.index(name) for name in first.arguments]
    name = function_name(blocks, names, used)
    local = local_names(blocks, [*inputs, *held], names)
    unpacked = tuple_code([local[block.tokens[place]] for place in held])
    lines = wrapped_call(f"    {unpacked} = weights", "    ")
    for statement in first.statements:
        lines += rename_tokens(replace(statement, name=""), local).lines()
    ends = [
        tuple_code([local[each] for each in values]) for values in (first.flowing, first.others)
    ]
    arguments = ", ".join(local[each] for each in first.arguments)
    text = "\n".join(
        [
            "@recompute",
            f"def {name}(p, weights, {arguments}):",
            f'    """One of {len(equal)} equal layers."""',
            *lines,
            f"    return {', '.join(ends)}",
            "",
        ]
    )
    weights = {segment.number: tuple(own.tokens[place] for place in held) for segment, own in equal}
    return SegmentFunction(name, text, weights)
