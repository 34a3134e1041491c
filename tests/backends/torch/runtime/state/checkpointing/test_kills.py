"""Ranks are killed at random instants in and around saving: what was committed loads, and the last
is never lost.
"""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from random import Random

import pytest

from autopipe.backends.torch.checkpoint import (
    CheckpointReader,
    checkpoint_path,
    committed_steps,
    read_checkpoint,
    verify_file,
)
from autopipe.ir.layout import TensorSlice
from tests.backends.torch.runtime.state.checkpointing.saving import (
    ROWS,
    digest_of,
    heard,
    save_all_steps,
)

PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "autopipe.backends.torch.runtime"]
PATIENCE_S = 200.0
MOST_SAVES = 3
LONGEST_S = 0.05
"""Ranks are killed so long at most after they began one of their first saves: these take some ten
milliseconds.
"""


class Survivor:
    """A folder of checkpoints whose ranks are killed again and again."""

    def __init__(self, folder: Path, world_size: int, random: Random) -> None:
        self._folder = folder
        self._size = world_size
        self._random = random
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["torch", "torch.distributed", "torch._dynamo", "autopipe.backends.torch.runtime"]
        )
        self._states: dict[tuple[int, int], str] = {}
        """By step and rank, what each would save."""
        self.committed = 0
        """The last step that is known to be committed."""
        self.kills = 0

    def kill_once(self) -> None:
        """Start all ranks, let them save for a while, kill them, and look at what they leave."""
        pipes = [self._context.Pipe(duplex=False) for _ in range(self._size)]
        store = self._folder.with_name(f"store{self.kills}")
        processes = [
            self._context.Process(
                target=save_all_steps,
                args=(self._folder, rank, self._size, str(store), says),
                daemon=True,
            )
            for rank, (_, says) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        for rank, (hears, says) in enumerate(pipes):
            says.close()
            assert hears.poll(PATIENCE_S), "a rank does not start"
            what, step, digest = hears.recv()
            assert what == "restored" and step >= self.committed
            assert step == 0 or digest == self._states[step, rank], (
                "what is restored is not what was saved"
            )
        for _ in range(self._random.randrange(2 * MOST_SAVES)):
            assert pipes[0][0].poll(PATIENCE_S), "a rank does not get on"
            self._note(0, *pipes[0][0].recv())
        time.sleep(self._random.uniform(0, LONGEST_S))
        for process in self._random.sample(processes, self._size):
            process.kill()
        for rank, (process, (hears, _)) in enumerate(zip(processes, pipes, strict=True)):
            process.join()
            for what, step, digest in heard(hears):
                self._note(rank, what, step, digest)
            hears.close()
        self.kills += 1
        self._look()

    def _note(self, rank: int, what: str, step: int, digest: str) -> None:
        if what == "saves":
            self._states[step, rank] = digest
        else:
            self.committed = max(self.committed, step)

    def _look(self) -> None:
        """Every committed checkpoint is whole; the newest is no older than the last commit."""
        steps = committed_steps(self._folder)
        assert max(steps, default=0) >= self.committed
        for step in steps:
            path = checkpoint_path(self._folder, step)
            checkpoint = read_checkpoint(path)
            for file in checkpoint.files:
                verify_file(path, file)
            reader = CheckpointReader(path, checkpoint)
            split, whole = (checkpoint.parameter(name) for name in ("split", "whole"))
            assert split is not None and whole is not None
            rows = ROWS // self._size
            for rank in range(self._size):
                box = TensorSlice((rows * rank, 0), (rows * (rank + 1), split.value.shape[1]))
                own = digest_of(
                    reader.read(split.value, box).tobytes(), reader.read(whole.value).tobytes()
                )
                assert own == self._states[step, rank]


def test_killed_ten_times(tmp_path: Path) -> None:
    survivor = Survivor(tmp_path / "saved", 1, Random(1))
    for _ in range(10):
        survivor.kill_once()
    assert survivor.committed >= 3, "few saves came to their end"


@pytest.mark.sweep
@pytest.mark.parametrize("world_size", [1, 2])
def test_killed_a_hundred_times(tmp_path: Path, world_size: int) -> None:
    survivor = Survivor(tmp_path / "saved", world_size, Random(world_size))
    for _ in range(100):
        survivor.kill_once()
    assert survivor.committed >= 25, "few saves came to their end"
