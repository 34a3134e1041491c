"""One rank's program without the other ranks: what comes from them is zeros, what goes to them is only counted."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from autopipe.backends.torch.runtime.pending import Arrival, Departure
from autopipe.backends.torch.runtime.pulse import DEFAULTS, Pulse, Timeouts
from autopipe.backends.torch.runtime.report import Reporter, peak_memory
from autopipe.backends.torch.runtime.transport import Transport
from autopipe.ir.traffic import by_kind

if TYPE_CHECKING:
    from autopipe.backends.torch.runtime.rank import Rank


@dataclass(frozen=True, slots=True)
class DryReport:
    """What one step of one rank does. Bytes are of one step."""

    rank: int
    world_size: int
    stages: tuple[int, ...]
    tasks: tuple[str, ...]
    sent_bytes: dict[int, int]
    """By the rank they go to, activations and their gradients."""
    received_bytes: dict[int, int]
    communication_bytes: dict[str, int]
    """What the rank's exchanges would move, by kind (`ir/traffic.py`)."""
    parameters: int
    parameter_bytes: int
    peak_memory_bytes: int


class DryTransport(Transport):
    """A rank's ends of channels whose other ends do not exist, on torch's `fake` process group."""

    def __init__(self, device: str, timeouts: Timeouts = DEFAULTS, pulse: Pulse | None = None) -> None:
        super().__init__(device, timeouts, pulse)
        self.nccl = self.staged = False
        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()

    def start(self) -> None:
        """Join a world in which every exchange returns at once."""
        if self.world_size > 1:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            dist.init_process_group("fake", rank=self.rank, world_size=self.world_size, store=FakeStore())

    def send(self, tensor: torch.Tensor, rank: int, channel: int, gradient: bool) -> Departure:
        """Count what would go."""
        self.sent[rank] += tensor.nbytes
        departure = super().send(tensor, rank, channel, gradient)
        departure.wait()  # It is gone at once.
        return departure

    def receive(self, like: tuple[torch.dtype, tuple[int, ...]], rank: int, channel: int, gradient: bool) -> Arrival:
        """Zeros instead of what would come."""
        arrival = super().receive(like, rank, channel, gradient)
        arrival.buffer.zero_()
        self.received[rank] += arrival.buffer.nbytes
        return arrival


class DryReporter(Reporter):
    """Says what the rank did instead of gathering figures of all ranks."""

    def __init__(self, rank: Rank, transport: DryTransport) -> None:
        super().__init__(rank)
        self._ends = transport

    def end_step(self, seconds: float) -> None:
        """Write the report of the step to the report file."""
        rank, ends = self._rank, self._ends
        report = DryReport(
            rank=rank.number,
            world_size=rank.manifest.world_size,
            stages=tuple(rank.stages),
            tasks=tuple(span.task for span in rank.clock.spans()),
            sent_bytes=dict(sorted(ends.sent.items())),
            received_bytes=dict(sorted(ends.received.items())),
            communication_bytes=by_kind(ends.traffic),
            parameters=sum(tensor.numel() for tensor in rank.parameters.values()),
            parameter_bytes=sum(tensor.nbytes for tensor in rank.parameters.values()),
            peak_memory_bytes=peak_memory(rank.device),
        )
        if rank.options.report is not None:
            rank.options.report.write_text(json.dumps(asdict(report)) + "\n", encoding="utf-8")
