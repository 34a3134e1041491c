"""One way to a placement: a strategy with its options, and what of the request it settles."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from autopipe.ir.plan import Choice
from autopipe.passes.base import Strategy
from autopipe.passes.request import Request


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request in which the schedule alone is open, told by what it settles."""

    strategy: Strategy
    micro_batches: int | None = None
    """None where the request says how many, or the strategy does."""
    recompute: str = "none"
    shard: bool = False
    """True if the optimizer's state is shared out among replicas."""

    def settled(self, request: Request) -> Request:
        """The request with what this candidate settles of it."""
        return dataclasses.replace(
            request,
            strategy=self.strategy,
            micro_batches=self._count(request),
            recompute=request.recompute or self.recompute,
            optimizer=dataclasses.replace(request.optimizer, shard=self._shards(request)),
        )

    def choice(self, request: Request, schedule: str | None = None) -> Choice:
        """Command-line choice that reproduces this candidate."""
        return Choice(
            strategy=self.strategy.name,
            options=_options(self.strategy),
            schedule=schedule,
            micro_batches=self._count(request),
            recompute=request.recompute or self.recompute,
            shard=self._shards(request),
        )

    def _count(self, request: Request) -> int | None:
        """The micro-batches that the request or this settles; None where the strategy is to choose."""
        if request.micro_batch_size is not None and request.batch_size is not None:
            return request.batch_size // request.micro_batch_size
        return request.micro_batches if self.micro_batches is None else self.micro_batches

    def _shards(self, request: Request) -> bool:
        return request.optimizer.shard or self.shard


def _options(strategy: Strategy) -> tuple[tuple[str, str], ...]:
    """The options of a strategy that are not its defaults; each has one. JSON's spelling is YAML's, too."""
    assert dataclasses.is_dataclass(strategy)
    given = ((field.name, getattr(strategy, field.name), field.default) for field in dataclasses.fields(strategy))
    return tuple(
        (name, value if isinstance(value, str) else json.dumps(value))
        for name, value, default in given
        if value != default
    )
