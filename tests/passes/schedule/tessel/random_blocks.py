"""Random block graphs: any dependencies, devices, times, delays, and memory that a micro-batch
frees again.
"""

from __future__ import annotations

from hypothesis import strategies

from autopipe.ir.block_schedule import Block, BlockGraph


@strategies.composite
def block_graphs(
    draw: strategies.DrawFn, blocks: int, devices: int, times: tuple[int, int], limits: bool = True
) -> BlockGraph:
    """Draw up to `blocks` blocks on up to `devices` devices, with times in the range `times`. With
    `limits`, memory limits are drawn that may be too low.
    """
    count = draw(strategies.integers(2, blocks))
    width = draw(strategies.integers(1, devices))
    group = strategies.lists(
        strategies.integers(0, width - 1), min_size=1, max_size=width, unique=True
    )
    after = [
        tuple(sorted(draw(strategies.sets(strategies.integers(0, index - 1), max_size=2))))
        if index
        else ()
        for index in range(count)
    ]
    groups = [tuple(draw(group)) for _ in range(count)]
    memory = [0] * count
    for index in range(count):
        later = [other for other in _followers(after, index) if groups[other] == groups[index]]
        if later and draw(strategies.booleans()):
            amount = draw(strategies.integers(1, 3))
            memory[index] += amount
            memory[draw(strategies.sampled_from(later))] -= amount
    made = tuple(
        Block(
            f"b{index}",
            groups[index],
            draw(strategies.integers(*times)),
            memory[index],
            after[index],
            tuple(draw(strategies.integers(0, times[0])) for _ in after[index]),
        )
        for index in range(count)
    )
    room = strategies.none() | strategies.integers(1, 6) if limits else strategies.none()
    return BlockGraph(width, made, tuple(draw(room) for _ in range(width)))


def _followers(after: list[tuple[int, ...]], index: int) -> list[int]:
    """Return the blocks that depend on a block, directly or through others."""
    found: list[int] = []
    for other in range(index + 1, len(after)):
        if index in after[other] or set(after[other]) & set(found):
            found.append(other)
    return found
