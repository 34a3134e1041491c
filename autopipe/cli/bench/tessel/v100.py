"""Models of the paper on its machines."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from autopipe.configs import zoo
from autopipe.configs.cluster import build_cluster, cluster_preset
from autopipe.configs.zoo.settings import Setting
from autopipe.ir.problem import Problem
from autopipe.passes.pipeline import Request, first_problem
from autopipe.passes.placement.tessel_shapes.strategy import TesselShapes
from autopipe.passes.runner import NullObserver, Runner

_CLUSTER = "v100-32gb"
_NO_LIMIT = 2**60


def problem_on_v100(
    model: str, settings: Mapping[str, Setting], devices: int, batch_size: int, micro_batch_size: int
) -> Problem:
    """A model of the zoo on so many V100 of 32 GB, eight a server, in fp16 with SGD: 8 bytes a parameter."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        zoo.build(zoo.configure(model, {**settings, "weights": "none"})).save(path)
        request = Request(  # Memory is asked afterwards, by `step_seconds`.
            path,
            build_cluster(cluster_preset(_CLUSTER), devices, None, None),
            strategy=None,
            scheduler=None,
            batch_size=batch_size,
            micro_batch_size=micro_batch_size,
            precision="fp16",
            recompute="full",
            memory_limit=_NO_LIMIT,
        )
        return first_problem(request, TesselShapes(), Runner(NullObserver()))[1]
