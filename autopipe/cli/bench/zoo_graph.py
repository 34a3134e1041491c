"""Graphs of the zoo's models, with their loss and without weights."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from autopipe.configs import zoo
from autopipe.ir.graph import Graph
from autopipe.passes.frontend import read_model

Settings = tuple[tuple[str, int | str], ...]
"""Sizes of a model of the zoo."""


@cache
def zoo_graph(model: str, settings: Settings, samples: int) -> Graph:
    """One evaluation of a model on so many samples, read once."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        zoo.build(zoo.configure(model, {**dict(settings), "loss": True, "weights": "none"})).save(path)
        return read_model(path, batch=samples).graph
