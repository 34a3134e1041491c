"""Loads parameters and constants, and assigns them to the stages of a rank. It can also load a
second program into the process of a rank.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from autopipe.backends.torch.runtime.communication.collectives import Group
from autopipe.backends.torch.runtime.manifest import read_manifest
from autopipe.backends.torch.runtime.random_numbers.random_streams import RandomStreams
from autopipe.backends.torch.runtime.state.arguments import parameter_index, set_attributes
from autopipe.backends.torch.runtime.state.parameters import (
    load_constants,
    load_parameters,
)
from autopipe.backends.torch.runtime.state.running_statistics import RunningStatistics
from autopipe.backends.torch.runtime.step.ports import Port
from autopipe.backends.torch.runtime.step.precision import LowPrecisionCopies, low_precision_type
from autopipe.backends.torch.runtime.step.stage import RankContext, Stage
from autopipe.backends.torch.runtime.step.weight_gradients import WeightGradQueue

_RUNTIME_PACKAGE = "autopipe.backends.torch.runtime"
"""The package from which generated files import `Rank`."""
_STAGE_MODULE_PATTERN = re.compile(r"stage_\d+")


def load_stages(rank: RankContext, has_values: bool) -> None:
    """Load the rank's parameters and constants and assign them to its stages. If `has_values` is
    False, the parameters are uninitialised.
    """
    manifest = rank.manifest
    narrow = None if rank.train else low_precision_type(manifest.precision)
    rank.parameters = load_parameters(
        manifest, rank.number, rank.device, rank.seed, narrow, has_values
    )
    for mode in rank.modes:
        mode.on_parameters(rank.parameters)
    rank.low_precision_copies = LowPrecisionCopies(rank.parameters, manifest)
    set_stage_arguments(rank)
    for mode in rank.modes:
        mode.on_stages(rank)


def set_stage_arguments(rank: RankContext) -> None:
    """Assign parameters, constants, process group, random numbers and running statistics to all
    stages of a rank, as attributes of their `p`.
    """
    names = {
        content
        for stage in rank.stages.values()
        for _, content in stage.attributes.attributes
        if isinstance(content, str) and content.startswith("c")
    }
    constants = load_constants(rank.manifest.folder, names, rank.device)
    for mode in rank.modes:
        mode.on_constants(constants)
    copies = rank.low_precision_copies.tensors
    held = frozenset(rank.manifest.low_precision)
    read = {
        index: copies.get(index, tensor) if index in held else tensor
        for index, tensor in rank.parameters.items()
    }
    named = constants | {f"w{index}": tensor for index, tensor in read.items()}
    for number, stage in rank.stages.items():
        attributes = stage.attributes.attributes
        set_attributes(stage.p, attributes, named)
        stage.p.group = Group(rank.manifest.stages[number].ranks, rank.transport)
        stage.p.random = RandomStreams(
            rank.device, stage.p.group.position, getattr(stage.module, "DRAWS", False)
        )
        stage.p.running = RunningStatistics()
        indices = dict.fromkeys(parameter_index(content) for _, content in attributes)
        stage.p.weight_grads = WeightGradQueue(
            read[index] for index in indices if index is not None
        )


class _StageCollector:
    """Replaces `Rank` while the generated file of a second program is executed. It adds the stages
    of that file to `context`.
    """

    def __init__(self, context: RankContext) -> None:
        self._context = context

    def stage(self, number: int, module: ModuleType, *ports: Port) -> Stage:
        """Create a stage, as `Rank.stage` does, and return it."""
        made = Stage(self._context, number, module, ports)
        self._context.stages[number] = made
        return made


def load_second_program(rank: RankContext, folder: Path) -> tuple[RankContext, Callable[[], None]]:
    """Load the program in `folder`, for the rank of this process. Return its rank, as a
    `RankContext`, and its generated function `step`.

    The second program uses the parameters, process groups and channels of the first program,
    `rank`. The shapes of its other tensors may differ.
    """
    context = RankContext(
        rank.number,
        rank.options,
        read_manifest(folder),
        rank.transport,
        rank.heartbeat,
        rank.modes,
    )
    context.parameters = rank.parameters
    context.low_precision_copies = rank.low_precision_copies
    spec = importlib.util.spec_from_file_location(
        f"{folder.name}_rank", folder / f"rank_{rank.number:03d}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # The stage modules of both programs have equal names. So the modules of the first program are
    # removed from `sys.modules` while the second program is loaded.
    own = {
        name: sys.modules.pop(name)
        for name in tuple(sys.modules)
        if _STAGE_MODULE_PATTERN.fullmatch(name)
    }
    sys.path.insert(0, str(folder))
    package = vars(sys.modules[_RUNTIME_PACKAGE])
    package["Rank"] = lambda _number, _file: _StageCollector(context)
    try:
        spec.loader.exec_module(module)
    finally:
        del package["Rank"]
        sys.path.remove(str(folder))
        for name in tuple(sys.modules):
            if _STAGE_MODULE_PATTERN.fullmatch(name):
                del sys.modules[name]
        sys.modules.update(own)
    set_stage_arguments(context)
    return context, module.step
