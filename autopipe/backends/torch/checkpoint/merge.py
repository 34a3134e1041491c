"""One manifest of all ranks' parts, each of which is a manifest of a single file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopipe.backends.torch.checkpoint.form import Checkpoint, StoredParameter, StoredTensor


def merged(parts: Sequence[Checkpoint]) -> Checkpoint:
    """The checkpoint whose files, blocks and generators are those of all parts; the rest is alike in all of them."""
    parameters: dict[str, StoredParameter] = {}
    for number, part in enumerate(parts):
        for found in part.parameters:
            own = _renumbered(found, number)
            known = parameters.get(own.name)
            parameters[own.name] = own if known is None else _joined(known, own)
    return replace(
        parts[0],
        files=tuple(file for part in parts for file in part.files),
        parameters=tuple(parameters[name] for name in sorted(parameters)),
        random=tuple(
            replace(each, state=_in_file(each.state, number))
            for number, part in enumerate(parts)
            for each in part.random
        ),
    )


def _renumbered(parameter: StoredParameter, file: int) -> StoredParameter:
    state = tuple((name, _in_file(tensor, file)) for name, tensor in parameter.state)
    return replace(parameter, value=_in_file(parameter.value, file), state=state)


def _in_file(tensor: StoredTensor, file: int) -> StoredTensor:
    return replace(tensor, blocks=tuple(replace(block, file=file) for block in tensor.blocks))


def _joined(one: StoredParameter, other: StoredParameter) -> StoredParameter:
    """A parameter of which two parts hold blocks."""
    state = dict(one.state)
    for name, tensor in other.state:
        state[name] = _with_blocks(state[name], tensor) if name in state else tensor
    return replace(
        one,
        value=_with_blocks(one.value, other.value),
        state=tuple(sorted(state.items())),
        scalars=tuple(sorted((dict(one.scalars) | dict(other.scalars)).items())),
    )


def _with_blocks(one: StoredTensor, other: StoredTensor) -> StoredTensor:
    return replace(one, blocks=(*one.blocks, *other.blocks))
