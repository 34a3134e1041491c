"""What ranks ask NCCL for, recorded while gloo does it, so that no GPU is needed.

Messages have no tags: as over NCCL, those of a communicator meet in the order in which both ends
post them, and in any other order ranks compute wrong numbers or wait for ever.
"""

from __future__ import annotations

import contextlib
import json
import runpy
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from autopipe.backends.torch.runtime.communication.transport import Transport


@dataclass(frozen=True, slots=True)
class Communicator:
    """A call of `new_group`; the options are None where the rank is no member."""

    ranks: list[int]
    timeout_s: float
    device: str
    blocking: int | None = None
    high_priority: bool | None = None
    max_ctas: int | None = None


@dataclass(frozen=True, slots=True)
class Use:
    """Messages (or one collective, of no messages) over the communicator that was made as number
    `communicator`.
    """

    communicator: int
    messages: int = 0


@dataclass(slots=True)
class Record:
    """Of one rank: communicators in the order of their making, uses before the barrier and
    after.
    """

    made: list[Communicator] = field(default_factory=list)
    warm_up: list[Use] = field(default_factory=list)
    step: list[Use] = field(default_factory=list)
    barriers: int = 0


class _Works:
    """A batch under way. Gloo must be waited for once, and those who wait are the batch's
    messages.
    """

    def __init__(self, works: list[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        works = self._works
        self._works = []
        for work in works:
            work.wait()

    def is_completed(self) -> bool:
        return not self._works


@contextlib.contextmanager
def recording() -> Iterator[Record]:
    """Ranks take gloo for NCCL meanwhile, and CPUs for GPUs of their own."""
    record = Record()
    numbers: dict[dist.ProcessGroup, int] = {}
    gloo = SimpleNamespace(
        **{
            name: getattr(dist, name)
            for name in ("new_group", "get_backend", "all_reduce", "barrier")
        }
    )

    def options(is_high_priority_stream: bool) -> Any:
        return SimpleNamespace(
            is_high_priority_stream=is_high_priority_stream, config=SimpleNamespace(max_ctas=None)
        )

    def new_group(
        ranks: Any = None, timeout: timedelta | None = None, backend: str | None = None, **more: Any
    ) -> Any:
        if backend != "nccl":
            return gloo.new_group(ranks, timeout=timeout, backend=backend, **more)
        assert record.barriers == 0, "a communicator is made after ranks have begun"
        assert timeout is not None
        made = gloo.new_group(ranks, timeout=timeout)
        given = more.pop("pg_options")
        settings = ()
        if given is not None:
            assert given._timeout == timeout, "torch would warn of it"
            settings = given.config.blocking, given.is_high_priority_stream, given.config.max_ctas
            numbers[made] = len(record.made)
        record.made.append(
            Communicator(ranks, timeout.total_seconds(), str(more.pop("device_id")), *settings)
        )
        assert not more
        return made

    def use(group: Any, messages: int = 0) -> None:
        if group in numbers:
            (record.step if record.barriers else record.warm_up).append(
                Use(numbers[group], messages)
            )

    def batch_isend_irecv(operations: list[dist.P2POp]) -> list[Any]:
        (group,) = {each.group for each in operations}
        use(group, len(operations))
        return [_Works([each.op(each.tensor, each.peer, group=group) for each in operations])]

    def all_reduce(*arguments: Any, group: Any = None, **more: Any) -> Any:
        use(group)
        return gloo.all_reduce(*arguments, group=group, **more)

    def get_backend(group: Any = None) -> str:
        return "nccl" if group in numbers else gloo.get_backend(group)

    def barrier() -> None:
        record.barriers += 1
        gloo.barrier()

    stand_ins = {
        "new_group": new_group,
        "batch_isend_irecv": batch_isend_irecv,
        "all_reduce": all_reduce,
    }
    stand_ins |= {"get_backend": get_backend, "barrier": barrier}
    stand_ins["ProcessGroupNCCL"] = SimpleNamespace(Options=options)  # type: ignore[assignment]
    patches = (
        mock.patch.multiple(dist, create=True, **stand_ins),
        mock.patch.object(torch.cuda, "synchronize"),
        mock.patch.object(Transport, "start", lambda self: self._select_backend(nccl=True)),
    )
    with contextlib.ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        yield record


def record_ranks(folder: Path, ranks: int) -> None:
    """From now on the programs of a folder leave there what they ask NCCL for."""
    for rank in range(ranks):
        file = folder / f"rank_{rank:03d}.py"
        file.rename(folder / f"recorded_{rank:03d}.py")
        file.write_text(f"from {__name__} import run\n\nrun(__file__, {rank})\n", encoding="utf-8")


def run(file: str, rank: int) -> None:
    """Run a rank, and write its record."""
    folder = Path(file).parent
    with recording() as record:
        runpy.run_path(str(folder / f"recorded_{rank:03d}.py"), run_name="__main__")
    (folder / f"recorded_{rank:03d}.json").write_text(json.dumps(asdict(record)), encoding="utf-8")


def read_record(folder: Path, rank: int) -> Record:
    form = json.loads((folder / f"recorded_{rank:03d}.json").read_text(encoding="utf-8"))
    uses = ([Use(**each) for each in form[name]] for name in ("warm_up", "step"))
    return Record([Communicator(**each) for each in form["made"]], *uses, form["barriers"])
