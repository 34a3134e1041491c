"""Seconds of the exact min-sum solvers on models that resemble a Transformer and InceptionV3.

    python benchmarks/min_sum.py --devices 16 32 64 --seeds 0 1

Layers, axes and edges are those of the two networks. A configuration is a degree for each axis. The
cost of a layer is its work on a device plus its all-reduces, times a random factor. The cost of an
edge is the part of the reader's tile that its device does not have. Seconds are CPU seconds without
building the tables. `limited` is the search within a memory limit: the minimum memory plus the
fraction `--limit` of the difference to the memory of the best choice.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

import numpy as np
from command_line import parse_arguments

from autopipe.passes.solvers.min_sum import (
    Assignment,
    Edge,
    MinSum,
    TableTooLargeError,
    eliminate,
    solve,
)
from autopipe.passes.solvers.min_sum.elimination import ORDERINGS

WORD_COST = 5000.0
"""Cost of moving a word, in multiply-adds."""
SIZES = {"b": 64, "l": 256, "m": 256, "e": 512, "h": 8, "k": 64, "f": 2048, "v": 50000, "s": 3}
"""Sizes of the Transformer's axes; layers of InceptionV3 have their sizes in the call."""


@dataclass(frozen=True)
class Layer:
    """A layer: (axis, size) of its iteration space, and the axes of its result."""

    sizes: tuple[tuple[str, int], ...]
    result: str


@dataclass
class Network:
    """Layers in order, and the reads (source, target, axes of the target)."""

    devices: int
    rng: np.random.Generator
    layers: list[Layer] = field(default_factory=list)
    reads: list[tuple[int, int, str]] = field(default_factory=list)

    def add(self, axes: str, result: str, *reads: tuple[int, str], **extents: int) -> int:
        """Add a layer that reads these results, and return its index. `reads` contains the source
        and the names of its axes in the layer.
        """
        known = {**SIZES, **extents}
        self.layers.append(Layer(tuple((axis, known[axis]) for axis in axes), result))
        node = len(self.layers) - 1
        self.reads += [(source, node, names) for source, names in reads]
        return node

    def model(self) -> MinSum:
        """Return the model. Equal layers and equal edges share their arrays."""
        degrees = {layer: _degrees(layer, self.devices) for layer in set(self.layers)}
        factors = {layer: self.rng.uniform(1, 4) for layer in dict.fromkeys(self.layers)}
        costs = {layer: factors[layer] * _work(layer, degrees[layer]) for layer in factors}
        memory = {layer: _tile(layer, layer.result, degrees[layer]) for layer in factors}
        matrices = {
            key: _moved(*key, degrees)
            for key in {
                (self.layers[source], self.layers[target], names)
                for source, target, names in self.reads
            }
        }
        edges = [
            Edge(source, target, matrices[self.layers[source], self.layers[target], names])
            for source, target, names in self.reads
        ]
        nodes = self.layers
        return MinSum(tuple(costs[n] for n in nodes), tuple(edges), tuple(memory[n] for n in nodes))


def _degrees(layer: Layer, devices: int) -> np.ndarray:
    """Return [configurations, axes]: divisors of the sizes whose product is at most the number of
    devices.
    """
    rows: list[tuple[int, ...]] = [()]
    for _, extent in layer.sizes:
        divisors = [d for d in range(1, devices + 1) if extent % d == 0]
        rows = [(*row, d) for row in rows for d in divisors if prod(row) * d <= devices]
    return np.array(rows, float)


def _tile(layer: Layer, axes: str, degrees: np.ndarray) -> np.ndarray:
    """Return the words per device of a tensor with these axes, for each configuration."""
    columns = [index for index, (axis, _) in enumerate(layer.sizes) if axis in axes]
    extents = np.array([layer.sizes[index][1] for index in columns], float)
    words: np.ndarray = np.floor(np.prod(extents / degrees[:, columns], axis=1))
    return words


def _work(layer: Layer, degrees: np.ndarray) -> np.ndarray:
    """Return the multiply-adds per device, plus the cost of the all-reduces of the result and of
    the weight gradients.
    """
    axes = "".join(axis for axis, _ in layer.sizes)
    weights = "".join(axis for axis in axes if axis not in "blmxy")
    costs = 3 * _tile(layer, axes, degrees)
    for tensor in (layer.result, weights):
        summed = [index for index, axis in enumerate(axes) if axis not in tensor]
        parts = np.prod(degrees[:, summed], axis=1)
        costs += 2 * WORD_COST * _tile(layer, tensor, degrees) * (parts - 1) / parts
    return costs


def _moved(
    source: Layer, target: Layer, names: str, degrees: dict[Layer, np.ndarray]
) -> np.ndarray:
    """Return the cost of the words of the target's tile that its device does not have."""
    have = [_tile(source, axis, degrees[source]) for axis in source.result]
    need = [_tile(target, axis, degrees[target]) for axis in names]
    both = prod(np.minimum.outer(one, other) for one, other in zip(have, need, strict=True))
    used = [
        np.prod(np.stack([np.round(t.max() / t) for t in tiles]), axis=0) for tiles in (have, need)
    ]
    both = np.where(used[1] > used[0][:, None], 0, both)
    moved: np.ndarray = 2 * WORD_COST * np.maximum(0, prod(need) - both)
    return moved


def transformer(devices: int, seed: int, layers: int = 6) -> MinSum:
    """Return the model of an encoder and a decoder of six layers each."""
    network = Network(devices, np.random.default_rng(seed))
    add = network.add

    def attention(at: int, memory: int) -> int:
        if memory == at:
            stacked = add("sblhek", "sbhlk", (at, "ble"))
            query, key, value = (add("sbhlk", "bhlk", (stacked, "sbhlk")) for _ in range(3))
        else:
            query = add("blhek", "bhlk", (at, "ble"))
            key, value = (add("blhek", "bhlk", (memory, "ble")) for _ in range(2))
        scores = add("bhlmk", "bhlm", (query, "bhlk"), (key, "bhmk"))
        shares = add("bhlm", "bhlm", (scores, "bhlm"))
        mixed = add("bhlmk", "bhlk", (shares, "bhlm"), (value, "bhmk"))
        return normed(add("blhek", "ble", (mixed, "bhlk")), at)

    def normed(at: int, beside: int) -> int:
        return add("ble", "ble", (add("ble", "ble", (at, "ble"), (beside, "ble")), "ble"))

    def forward(at: int) -> int:
        return normed(add("blef", "ble", (add("blef", "blf", (at, "ble")), "blf")), at)

    at = add("blev", "ble")
    for _ in range(layers):
        at = attention(at, at)
        at = forward(at)
    memory = at
    at = add("blev", "ble")
    for _ in range(layers):
        at = attention(at, at)
        at = attention(at, memory)
        at = forward(at)
    add("blv", "blv", (add("blev", "blv", (at, "ble")), "blv"))
    return network.model()


def inception(devices: int, seed: int) -> MinSum:
    """Return the model of eleven modules of four branches of convolutions."""
    network = Network(devices, np.random.default_rng(seed))

    def convolution(at: int | None, n: int, c: int, size: int) -> int:
        reads = () if at is None else ((at, "bcxy"),)
        at = network.add("bcxyn", "bnxy", *reads, b=128, c=c, n=n, x=size, y=size)
        at = network.add("bnxy", "bnxy", (at, "bnxy"), b=128, n=n, x=size, y=size)
        return network.add("bnxy", "bnxy", (at, "bnxy"), b=128, n=n, x=size, y=size)

    at = convolution(None, 32, 3, 149)
    channels = 32
    for module in range(11):
        size = (35, 17, 8)[min(2, module // 4)]
        width = (64, 192, 320)[min(2, module // 4)]
        ends = []
        for branch in range(4):
            end = convolution(at, width, channels, size)
            for _ in range(branch % 3):
                end = convolution(end, width, width, size)
            ends.append(end)
        channels = 4 * width
        at = network.add(
            "bnxy", "bnxy", *((end, "bnxy") for end in ends), b=128, n=channels, x=size, y=size
        )
    network.add("bcn", "bn", (at, "bcxy"), b=128, c=channels, n=1000)
    return network.model()


def timed(function: Callable[[], Assignment]) -> str:
    """Return the seconds with the gap, if there is no proof, or "too large"."""
    begin = time.process_time()
    try:
        answer = function()
    except TableTooLargeError:
        return "too large"
    return f"{time.process_time() - begin:.3f}" + (
        "" if answer.proven else f" (gap {answer.gap:.1e})"
    )


def row(model: MinSum, fraction: float) -> list[str]:
    """Return the seconds of all methods."""
    best = solve(model)
    minimum = sum(float(memory.min()) for memory in model.memory or ())
    limit = minimum + fraction * (best.memory - minimum)
    methods: list[Callable[[], Assignment]] = [
        lambda: solve(model),
        *(lambda ordering=ordering: eliminate(model, ordering) for ordering in ORDERINGS),
        lambda: solve(model, memory_limit=limit, time_limit=60),
    ]
    return [timed(method) for method in methods]


def main() -> None:
    """Print a line for each model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--limit", type=float, default=0.5)
    arguments = parse_arguments(parser, devices=[4])
    columns = "{:<12} {:>7} {:>4} {:>5} {:>5} {:>8}" + " {:>13}" * (len(ORDERINGS) + 2)
    print(
        columns.format(
            "model", "devices", "seed", "nodes", "edges", "largest", "solve", *ORDERINGS, "limited"
        )
    )
    for devices in arguments.devices:
        for make in (transformer, inception):
            for seed in arguments.seeds:
                model = make(devices, seed)
                sizes = [
                    len(model.costs),
                    len(model.edges),
                    max(len(costs) for costs in model.costs),
                ]
                print(
                    columns.format(
                        make.__name__, devices, seed, *sizes, *row(model, arguments.limit)
                    ),
                    flush=True,
                )


if __name__ == "__main__":
    main()
