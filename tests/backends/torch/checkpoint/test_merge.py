"""Parts of several ranks become one manifest."""

from __future__ import annotations

from autopipe.backends.torch.checkpoint import (
    Checkpoint,
    StoredFile,
    StoredGenerator,
    StoredParameter,
    StoredSlice,
    StoredTensor,
    merge_manifests,
)
from autopipe.ir.layout import TensorSlice


def rows(start: int, stop: int, file: int = 0) -> StoredTensor:
    return StoredTensor(
        "float32",
        (4,),
        (StoredSlice(TensorSlice((start,), (stop,)), file, 8 * start, f"p{start}"),),
    )


def part(rank: int, *parameters: StoredParameter) -> Checkpoint:
    file = StoredFile(f"rank_{rank}.safetensors", 10, str(rank))
    random = (StoredGenerator(rank, "cpu", rows(0, 4, file=rank)),)
    return Checkpoint(
        "m.onnx", "digest", "plan", 2, 5, 40, 7, {"name": "adamw"}, (file,), parameters, random
    )


def test_blocks_of_a_parameter_come_together() -> None:
    first = part(
        0,
        StoredParameter("w", True, rows(0, 1), (("exp_avg", rows(0, 1)),), (("step", 2.0),)),
        StoredParameter("b", True, rows(0, 4)),
    )
    own = rows(1, 4, file=1)
    second = part(1, StoredParameter("w", True, own, (("exp_avg", own),), (("step", 2.0),)))
    found = merge_manifests([first, second])
    assert [file.name for file in found.files] == ["rank_0.safetensors", "rank_1.safetensors"]
    assert [each.name for each in found.parameters] == ["b", "w"]
    b, w = found.parameters
    assert b.value == rows(0, 4)
    assert w.value.blocks == (*rows(0, 1).blocks, *rows(1, 4, file=1).blocks)
    assert dict(w.state)["exp_avg"] == w.value and w.scalars == (("step", 2.0),)
    assert [(each.rank, each.state.blocks[0].file) for each in found.random] == [(0, 0), (1, 1)]
