"""The price of every range of blocks as one stage, by where the stage stands."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.cluster import Device, Link
from autopipe.passes.analysis.chain import Matrix
from autopipe.passes.cost.communication import Cost
from autopipe.passes.cost.memory_check import may_share
from autopipe.passes.cost.range_tables import Tables
from autopipe.passes.cost.stage_work import exchange_of_gradients
from autopipe.passes.placement.pipedream.search import ChainStage


class StagePrices:
    """Prices by place from the end, first device and degree; surroundings that are alike share their figures."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.problem = tables.problem
        count = tables.chain.blocks + 1
        self._empty = np.where(np.tri(count, count, 0, dtype=bool), np.inf, 0.0)
        self._compute = cache(tables.seconds)
        self._parts = cache(tables.memory)
        self._overhead = cache(tables.overhead)
        self._times = cache(self._stage_seconds)
        self._fits = cache(self._within)

    def seconds(self, place: int, device: int, degree: int) -> Matrix:
        """Seconds of a micro-batch, plain or with recomputation; infinite where memory does not hold.

        So it is where the stage would straddle kinds of devices unasked.
        """
        if not may_share(self.problem, range(device, device + degree)):
            return np.full_like(self._empty, np.inf)
        plain, again = self._times(degree, self._devices(device, degree), *self._links(device, degree))
        fits, fits_again = self._fits(degree, self._in_flight(place), self._limit(device, degree))
        return np.where(fits, plain, np.where(fits_again, again, np.inf))

    def excess(self, place: int, device: int, degree: int) -> Matrix:
        """Bytes over the memory limit (below zero where there is room) of the way that needs least."""
        if not may_share(self.problem, range(device, device + degree)):
            return np.full_like(self._empty, np.inf)
        plain, again = self._memory(degree, self._in_flight(place))
        return np.minimum(plain, again) - self._limit(device, degree) + self._empty

    def recomputes(self, place: int, piece: ChainStage) -> bool:
        """True if a stage of an answer runs its forward again."""
        fits, _ = self._fits(piece.degree, self._in_flight(place), self._limit(piece.device, piece.degree))
        return not fits[piece.first, piece.stop]

    def _in_flight(self, place: int) -> int:
        return min(place, self.problem.micro_batches)

    def _limit(self, device: int, degree: int) -> int:
        return min(self.problem.memory_of(member) for member in range(device, device + degree))

    def _devices(self, device: int, degree: int) -> frozenset[Device]:
        return frozenset(self.problem.cluster.devices[device : device + degree])

    def _links(self, device: int, degree: int) -> tuple[Link | None, Link | None, Cost]:
        """The links from the stage before and to the one after, and the group's exchange of gradients."""
        cluster = self.problem.cluster
        before = cluster.link(device - 1, device) if device else None
        last = device + degree - 1
        after = cluster.link(last, last + 1) if last + 1 < cluster.size else None
        return before, after, exchange_of_gradients(self.problem, range(device, last + 1))

    def _stage_seconds(
        self, degree: int, devices: frozenset[Device], before: Link | None, after: Link | None, reduce: Cost
    ) -> tuple[Matrix, Matrix]:
        """Seconds of a stage without and with recomputation, on the slowest of its devices."""
        plain, again = [], []
        for device in devices:
            forward, backward = self._compute(degree, device)
            rest = self._overhead(degree, device, before, after, reduce) + self._empty
            plain.append(forward + backward + rest)
            again.append(2 * forward + backward + rest)
        return np.maximum.reduce(plain), np.maximum.reduce(again)

    def _memory(self, degree: int, in_flight: int) -> tuple[Matrix, Matrix]:
        """Bytes without and with recomputation; infinite for what the options exclude."""
        recompute = self.problem.recompute if self.problem.train else "none"
        never = np.full_like(self._empty, np.inf)
        always, each = self._parts(degree, False)
        plain = never if recompute == "full" else always + each * in_flight
        always, each = self._parts(degree, True)
        again = never if recompute == "none" else always + each * in_flight
        return plain, again

    def _within(self, degree: int, in_flight: int, limit: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        plain, again = self._memory(degree, in_flight)
        return plain <= limit, again <= limit
