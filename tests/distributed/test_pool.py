"""The processes that run programs: what a rank raises is told, what never ends is ended, and the
next run works.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.support.pool import Pools, RankFailure

pytestmark = pytest.mark.distributed

GROUP = "import torch.distributed as dist\ndist.barrier()\n"


def ranks(folder: Path, *texts: str) -> Path:
    for number, text in enumerate(texts):
        (folder / f"rank_{number:03d}.py").write_text(text, encoding="utf-8")
    return folder


def test_each_rank_is_a_program_of_its_own(pools: Pools, tmp_path: Path) -> None:
    (tmp_path / "stage_00.py").write_text("NAME = 'first'\n", encoding="utf-8")
    text = (
        "import os, sys, stage_00\nprint(__name__, os.environ['RANK'], stage_00.NAME, "
        "sys.argv[1:])\n"
    )
    folder = ranks(tmp_path, text + GROUP, text + GROUP)
    assert pools.of(2).run(folder, "--steps", 3) == [
        f"__main__ {rank} first ['--steps', '3']\n" for rank in range(2)
    ]
    (tmp_path / "stage_00.py").write_text("NAME = 'other'\n", encoding="utf-8")
    assert "other" in pools.of(2).run(folder)[0]


def test_the_error_of_a_rank_is_told_and_the_next_run_works(pools: Pools, tmp_path: Path) -> None:
    failing = ranks(tmp_path, GROUP, "raise ValueError('no such luck')\n")
    with pytest.raises(RankFailure, match=r"rank 1 failed:(.|\n)*no such luck"):
        pools.of(2).run(failing)
    assert pools.of(2).run(ranks(tmp_path, GROUP, GROUP)) == ["", ""]


def test_ranks_that_wait_for_ever_are_ended(pools: Pools, tmp_path: Path) -> None:
    pools.of(2).run(ranks(tmp_path, "", ""))
    waiting = ranks(tmp_path, GROUP, "")
    with pytest.raises(RankFailure, match=r"ranks \[0(, 1)?\] of 2 did not finish within 5 s"):
        pools.of(2).run(waiting, timeout_s=5)
    assert pools.of(2).run(ranks(tmp_path, GROUP, GROUP)) == ["", ""]


def test_a_process_that_dies_is_told(pools: Pools, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="the process of rank 0 died"):
        pools.of(1).run(ranks(tmp_path, "import os\nos._exit(3)\n"))
    assert pools.of(1).run(ranks(tmp_path, "print('here')\n")) == ["here\n"]
