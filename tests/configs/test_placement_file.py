"""Placements given by hand: what a file says, and one line with its place for what it cannot
say.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from autopipe.configs.placement_file import read_placement
from autopipe.ir.block_schedule import Block, BlockGraph
from autopipe.ir.errors import ConfigurationError

HEAD = "format: autopipe.placement/1\ndevices: 2\n"
GOOD = HEAD + (
    "memory: 6\n"
    "blocks:\n"
    "  - {name: F, devices: [0], time: 1, memory: 1}\n"
    "  - {name: T, devices: [0, 1], time: 2, after: [F], delays: [3]}\n"
    "  - {name: B, devices: [0], time: 4, memory: -1, after: [T, F]}\n"
)


def written(folder: Path, text: str) -> Path:
    path = folder / "p.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_gives_its_blocks(tmp_path):
    blocks = (
        Block("F", (0,), 1, 1),
        Block("T", (0, 1), 2, 0, (0,), (3,)),
        Block("B", (0,), 4, -1, (1, 0)),
    )
    assert read_placement(written(tmp_path, GOOD)) == BlockGraph(2, blocks, (6, 6))
    each = GOOD.replace("memory: 6", "memory: [6, 2]\nmicro_batches_per_unit: 2")
    assert read_placement(written(tmp_path, each)) == BlockGraph(2, blocks, (6, 2), 2)
    assert read_placement(written(tmp_path, GOOD.replace("memory: 6", "memory: null"))).memory == (
        None,
        None,
    )
    assert read_placement(written(tmp_path, GOOD.replace("memory: 6\n", ""))).memory == (None, None)


REFUSED = {
    "another format": ("memory: 6", "memory: 6\nformat: x/2", "the key 'format' occurs twice"),
    "an old format": (
        "placement/1",
        "placement/0",
        ":1: format: 'autopipe.placement/0' is none of",
    ),
    "no devices": ("devices: 2", "devices: 0", ":2: devices is 0 (it must be at least 1)"),
    "too many devices": ("devices: 2", "devices: 99999999", ":2: devices is 99999999"),
    "less than no memory": ("memory: 6", "memory: -1", ":3: memory is -1"),
    "memory of another cluster": (
        "memory: 6",
        "memory: [6]",
        ":1: memory lists 1 number, but the number of devices is 2",
    ),
    "a device out of range": (
        "devices: [0, 1]",
        "devices: [0, 2]",
        ":6: block 'T' is on device 2, but the number of devices is 2",
    ),
    "a device below 0": ("devices: [0, 1]", "devices: [-1]", ":6: blocks[1].devices[0] is -1"),
    "a device twice": ("devices: [0, 1]", "devices: [1, 1]", ":6: block 'T' lists a device twice"),
    "no device": ("devices: [0, 1]", "devices: []", ":6: block 'T' is on no device"),
    "no time": ("time: 2", "time: 0", ":6: blocks[1].time is 0 (it must be at least 1)"),
    "negative time": ("time: 2", "time: -3", ":6: blocks[1].time is -3"),
    "half a time": ("time: 2", "time: 0.5", ":6: blocks[1].time is 0.5 (expected a whole number"),
    "endless time": ("time: 2", "time: 9000000000000000", ":6: blocks[1].time is 9000000000000000"),
    "a missing time": (", time: 2", "", ":6: blocks[1] lacks the key 'time'"),
    "a name twice": ("name: T", "name: F", ":6: two blocks have the name 'F', the first in line 5"),
    "an unknown block": (
        "after: [F]",
        "after: [G]",
        ":6: block 'T' comes after 'G', which is not a block",
    ),
    "a negative delay": ("delays: [3]", "delays: [-3]", ":6: blocks[1].delays[0] is -3"),
    "a delay too many": (
        "delays: [3]",
        "delays: [3, 4]",
        ":6: block 'T' lists 2 delays for 1 block in `after`",
    ),
    "a circle": (
        "after: [F]",
        "after: [B]",
        ":6: blocks wait in a circle: 'T' after 'B' after 'T'",
    ),
    "a block after itself": (
        "after: [F]",
        "after: [T]",
        ":6: blocks wait in a circle: 'T' after 'T'",
    ),
    "an unknown key": (
        "time: 2",
        "tiem: 2",
        ":6: unknown key 'tiem' in blocks[1] (did you mean 'time'?)",
    ),
    "no blocks": (GOOD[GOOD.index("blocks:") :], "blocks: []\n", ":1: the file describes 0 blocks"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_said_in_one_line_with_its_place(tmp_path, case):
    before, after, expected = REFUSED[case]
    assert before in GOOD
    with pytest.raises(ConfigurationError) as caught:
        read_placement(written(tmp_path, GOOD.replace(before, after, 1)))
    assert expected in str(caught.value)
    assert "p.yaml:" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_circle_of_thousands_and_a_hostile_name_make_one_short_line(tmp_path):
    count = 2000
    lines = [
        f"  - {{name: {n}x, devices: [0], time: 1, after: [{(n + 1) % count}x]}}"
        for n in range(count)
    ]
    with pytest.raises(ConfigurationError, match="wait in a circle") as caught:
        read_placement(written(tmp_path, HEAD + "blocks:\n" + "\n".join(lines)))
    assert len(str(caught.value)) < 300
    hostile = '  - {name: "a\\nb\\e[31m", devices: [], time: 1}\n'
    with pytest.raises(ConfigurationError, match="is on no device") as caught:
        read_placement(written(tmp_path, HEAD + "blocks:\n" + hostile))
    assert str(caught.value).isprintable()
