"""One manifest of all ranks' parts, each of which is a manifest of a single file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopipe.backends.torch.checkpoint.form import Checkpoint, StoredParameter, StoredTensor

Numbered = tuple[int, StoredParameter]
"""A part's blocks of a parameter, and the number that the part's file gets."""


def merged(parts: Sequence[Checkpoint]) -> Checkpoint:
    """The checkpoint whose files, blocks and generators are those of all parts; the rest is alike in all of them."""
    found: dict[str, list[Numbered]] = {}
    for number, part in enumerate(parts):
        for parameter in part.parameters:
            found.setdefault(parameter.name, []).append((number, parameter))
    return replace(
        parts[0],
        files=tuple(file for part in parts for file in part.files),
        parameters=tuple(_joined(found[name]) for name in sorted(found)),
        random=tuple(
            replace(each, state=_of_blocks([(number, each.state)]))
            for number, part in enumerate(parts)
            for each in part.random
        ),
    )


def _joined(pieces: Sequence[Numbered]) -> StoredParameter:
    """A parameter of which several parts hold blocks."""
    states: dict[str, list[tuple[int, StoredTensor]]] = {}
    scalars: dict[str, float] = {}
    for number, piece in pieces:
        for name, tensor in piece.state:
            states.setdefault(name, []).append((number, tensor))
        scalars.update(piece.scalars)
    return replace(
        pieces[0][1],
        value=_of_blocks([(number, piece.value) for number, piece in pieces]),
        state=tuple((name, _of_blocks(tensors)) for name, tensors in sorted(states.items())),
        scalars=tuple(sorted(scalars.items())),
    )


def _of_blocks(tensors: Sequence[tuple[int, StoredTensor]]) -> StoredTensor:
    """A tensor of all these blocks, in files of these numbers."""
    blocks = (replace(block, file=number) for number, tensor in tensors for block in tensor.blocks)
    return replace(tensors[0][1], blocks=tuple(blocks))
