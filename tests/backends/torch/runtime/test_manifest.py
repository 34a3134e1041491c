"""The side file of a program is read as it was written, and refused in one line where it was
not.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopipe.backends.torch.runtime.manifest import read_manifest
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.placement import Placement, Split, Stage
from tests.distributed.support.builder import mlp
from tests.distributed.support.running import schedule_of, write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    graph, loss = mlp(2)
    placement = Placement(
        (Stage((0, 1), (1, 0), 4, ((0, (Split("n", 2),)),)), Stage((2, 3, 4, 5), (2,), 4))
    )
    write(graph, placement, schedule_of(graph, placement, 3), loss, tmp_path / "program")
    return tmp_path / "program"


def test_what_is_written_is_read(folder: Path) -> None:
    found = read_manifest(folder)
    assert (found.world_size, found.micro_batches, found.micro_batch_size, found.batch_size) == (
        3,
        3,
        4,
        12,
    )
    assert (found.train, found.loss, found.precision, found.seed) == (True, "v5", "fp32", 5)
    assert [stage.ranks for stage in found.stages] == [(1, 0), (2,)]
    halves = [
        [
            (shard.parameter, shard.box.starts, shard.box.stops, shard.gradient_ranks)
            for shard in each
        ]
        for each in found.shards
    ]
    assert halves == [
        [(0, (0, 2), (4, 4), (0,))],
        [(0, (0, 0), (4, 2), (1,))],
        [(1, (0, 0), (4, 4), (2,))],
    ]
    assert [(channel.source_rank, channel.target_rank) for channel in found.channels] == [(1, 2)], (
        "of two that hold the value, the first sends it"
    )
    assert found.inputs[0].batch_axis == 0
    assert found.outputs[0].places[0].shards[0].rank == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "is not a program folder"),
        ("", "not valid JSON"),
        ("[]", "not a manifest of format"),
        ('{"format": "autopipe.program/0"}', "not a manifest of format"),
        ('{"format": "autopipe.program/1"}', "the manifest is damaged: model is missing"),
    ],
)
def test_other_files(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "manifest.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=message):
        read_manifest(tmp_path)


def test_every_key_is_needed(folder: Path) -> None:
    path = folder / "manifest.json"
    whole = json.loads(path.read_text(encoding="utf-8"))
    # Digests of the folder's files, which only `codegen` reads: an edited program still runs.
    del whole["sha256"]
    # Programs of former versions do not state their form, which is flat.
    del whole["style"]
    path.write_text(json.dumps(whole), encoding="utf-8")
    assert read_manifest(folder).world_size == 3
    for key in whole:
        path.write_text(
            json.dumps({name: value for name, value in whole.items() if name != key}),
            encoding="utf-8",
        )
        with pytest.raises(ConfigurationError, match="manifest"):
            read_manifest(folder)


@pytest.mark.parametrize(
    "key", ["model", "inputs", "outputs", "parameters", "stages", "channels", "ranks", "seed"]
)
def test_values_of_other_types(folder: Path, key: str) -> None:
    path = folder / "manifest.json"
    whole = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(whole | {key: None}), encoding="utf-8")
    with pytest.raises(
        ConfigurationError, match=f"the manifest is damaged: {key}.* is (null|missing)"
    ):
        read_manifest(folder)
