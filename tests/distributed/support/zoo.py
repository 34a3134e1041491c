"""Small models of the zoo, as graphs to be placed by hand, and what one device computes of them."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

from autopipe.configs.zoo import MODELS, build, configure
from autopipe.ir.graph import Graph
from autopipe.passes.frontend import read_model
from benchmarks.small_models import SIZES
from tests.distributed.support.pool import Pools
from tests.distributed.support.trained import MICRO_BATCHES, Trained, trained

assert SIZES.keys() == MODELS.keys()

SAMPLES = 12


class SmallModels:
    """The models, each with its step on one device, as tests ask for them."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._known: dict[tuple[str, int, int], Trained] = {}

    def of(self, name: str, samples: int = SAMPLES, micro_batches: int = MICRO_BATCHES) -> Trained:
        """The model called `name` with so many samples a micro-batch."""
        key = name, samples, micro_batches
        if key not in self._known:
            graph, loss = small_graph(name, samples)
            self._known[key] = trained(self._pools, name, graph, loss, micro_batches=micro_batches)
        return self._known[key]


@lru_cache
def small_graph(name: str, samples: int = SAMPLES) -> tuple[Graph, str]:
    """The graph of training a small model on a micro-batch, parameters to be drawn, and its
    loss.
    """
    settings = {**SIZES[name], "loss": "true", "weights": "none"}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        build(configure(name, settings)).save(path)
        model = read_model(path, batch=samples)
    return model.graph, model.loss
