"""Values that a launch records: both forms of a stage give the same numbers for each value of the
model.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from autopipe.backends.torch.codegen.stage import Style, emit_forward
from autopipe.backends.torch.codegen.stage_file import emit_stage
from autopipe.backends.torch.runtime.modes.records import run_recorded
from autopipe.backends.torch.runtime.state.arguments import Arguments, set_attributes
from autopipe.ir.program import StageCode
from autopipe.passes.lower.lower import one_device_program
from tests.distributed.support.zoo import small_graph


def recorded(stage: StageCode, style: Style, folder: Path, tensors: dict[str, Any]) -> Any:
    """Return the recorded numbers of each value of the model by its name."""
    path = folder / f"stage_{style}.py"
    path.write_text(emit_stage(stage, "A stage.", style, is_training=False).text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    source = emit_forward(stage, style)
    p = Arguments(device=torch.device("cpu"), training=True)
    set_attributes(p, source.attributes, tensors)
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randint(0, 4, value.shape, generator=generator)
        if value.dtype.is_integer
        else torch.randn(value.shape, generator=generator)
        for value in stage.inputs
    ]
    with torch.no_grad():
        run_recorded(module.forward, (p, *inputs), folder / f"{style}.npz")
    with np.load(folder / f"{style}.npz", allow_pickle=False) as stored:
        return {name: stored[code] for name, code in source.codes.items() if code in stored}


@pytest.mark.parametrize("name", ["gpt", "llama", "mmt", "two-branch", "unet"])
def test_recorded_values(name: str, tmp_path: Path) -> None:
    graph, loss = small_graph(name, 2)
    (stage,) = one_device_program(graph, 1, 2, loss).stages
    generator = torch.Generator().manual_seed(1)
    tensors: dict[str, Any] = {
        f"w{index}": torch.randn(value.shape, generator=generator)
        for index, value in stage.parameters
    }
    tensors |= {f"c{index}": torch.from_numpy(each.array) for index, each in stage.constants}
    flat = recorded(stage, "flat", tmp_path, tensors)
    layered = recorded(stage, "layers", tmp_path, tensors)
    assert flat.keys() == layered.keys()
    assert len(flat) > len(graph.nodes) / 2
    for value in flat:
        np.testing.assert_array_equal(flat[value], layered[value], err_msg=value)
