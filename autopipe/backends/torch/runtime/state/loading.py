"""Loads parameters and constants, and assigns them to a program's stages. It can also load a second
program into the process of a rank.
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
from autopipe.backends.torch.runtime.random_numbers.random_streams import Random
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
"""The package from which a generated file imports `Rank`."""
_STAGE_MODULE_PATTERN = re.compile(r"stage_\d+")


def load_stages(rank: RankContext, has_values: bool) -> None:
    """Load the rank's parameters and assign them to its stages. If `has_values` is False,
    parameters are uninitialised.
    """
    manifest = rank.manifest
    narrow = None if rank.train else low_precision_type(manifest.precision)
    rank.parameters = load_parameters(
        manifest, rank.number, rank.device, rank.seed, narrow, has_values
    )
    for mode in rank.modes:
        mode.on_parameters(rank.parameters)
    rank.low_precision_copies = LowPrecisionCopies(rank.parameters, manifest)
    equip_stages(rank)
    for mode in rank.modes:
        mode.on_stages(rank)


def equip_stages(rank: RankContext) -> None:
    """Assign parameters, constants, process group and random numbers to all stages of a rank."""
    names = {name for stage in rank.stages.values() for name in stage.module.CONSTANTS}
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
        for name in (*stage.module.PARAMETERS, *stage.module.CONSTANTS):
            setattr(stage.p, name, named[name])
        stage.p.group = Group(rank.manifest.stages[number].ranks, rank.transport)
        stage.p.random = Random(
            rank.device, stage.p.group.position, getattr(stage.module, "DRAWS", False)
        )
        stage.p.running = RunningStatistics()
        stage.p.weight_grads = WeightGradQueue(named[name] for name in stage.module.PARAMETERS)


class _StageCollector:
    """Replaces `Rank` in a generated file: adds the file's stages to a given context."""

    def __init__(self, context: RankContext) -> None:
        self._context = context

    def stage(self, number: int, module: ModuleType, *ports: Port) -> Stage:
        made = Stage(self._context, number, module, ports)
        self._context.stages[number] = made
        return made


def load_second_program(rank: RankContext, folder: Path) -> tuple[RankContext, Callable[[], None]]:
    """Load the part of the program in `folder` for this rank. Return its context and its step
    function. The second program uses the first program's parameters, process groups and channels;
    its tensor shapes may differ.
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
    # Modules of stages have equal names in both programs.
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
    equip_stages(context)
    return context, module.step
