"""The dynamic programme: the chain of stages whose slowest one is fastest, by number of stages and of devices.

After Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", SOSP 2019, section 3.1, with
memory as in their "Memory-efficient pipeline-parallel DNN training", ICML 2021: under 1F1B the stage that is k-th from
the end keeps k micro-batches. It runs from the end of the chain, so that k is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from autopipe.passes.analysis.chain import Matrix


@dataclass(frozen=True, slots=True)
class ChainStage:
    """One stage of an answer: blocks `first` to `stop - 1` on `degree` devices from `device` on, at a price."""

    first: int
    stop: int
    device: int
    degree: int
    price: float


Price = Callable[[int, int, int], Matrix]
"""(place from the end counting from 1, first device, degree) → the price of every range of blocks there."""


def search(
    blocks: int, devices: int, stages: int, degrees: tuple[int, ...], price: Price, join: np.ufunc = np.maximum
) -> Iterator[list[ChainStage]]:
    """For every number of stages up to `stages` the best chain over all devices, if there is any.

    The best has the least largest price, or with `join=np.add` the least sum of prices.
    """
    best = {0: _ending(blocks)}
    choices: list[dict[int, tuple[np.ndarray, np.ndarray]]] = [{}]
    for place in range(1, min(stages, blocks, devices) + 1):
        reached: dict[int, np.ndarray] = {}
        chosen: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for rest, later in best.items():
            for degree in degrees:
                used = rest + degree
                if used > devices:
                    continue
                costs = join(price(place, devices - used, degree), later[None, :])
                stop = costs.argmin(axis=1)
                cost = np.take_along_axis(costs, stop[:, None], axis=1)[:, 0]
                if used not in reached:
                    reached[used], chosen[used] = cost, (stop, np.full(blocks + 1, degree))
                    continue
                better = cost < reached[used]
                reached[used] = np.where(better, cost, reached[used])
                stops, picked = chosen[used]
                chosen[used] = (np.where(better, stop, stops), np.where(better, degree, picked))
        best = {used: cost for used, cost in reached.items() if np.isfinite(cost).any()}
        choices.append(chosen)
        if devices in best and np.isfinite(best[devices][0]):
            yield _trace(choices, place, devices, price)


def _ending(blocks: int) -> np.ndarray:
    cost = np.full(blocks + 1, np.inf)
    cost[blocks] = 0.0
    return cost


def _trace(
    choices: list[dict[int, tuple[np.ndarray, np.ndarray]]], place: int, devices: int, price: Price
) -> list[ChainStage]:
    pieces = []
    first, used = 0, devices
    for left in range(place, 0, -1):
        stops, degrees = choices[left][used]
        stop, degree = int(stops[first]), int(degrees[first])
        device = devices - used
        pieces.append(ChainStage(first, stop, device, degree, float(price(left, device, degree)[first, stop])))
        first, used = stop, used - degree
    return pieces
