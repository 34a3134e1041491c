"""Forwards of stages through `torch.compile`, with their backwards. A micro-batch of zeros compiles
them before the first step, so that no step does. What waits for other ranks, and what waits for the
second half of a split backward, runs eagerly between compiled parts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import FunctionType

import torch

from autopipe.backends.torch.runtime.communication.collectives import Group
from autopipe.backends.torch.runtime.communication.transport import Transport
from autopipe.backends.torch.runtime.recompute import recompute
from autopipe.backends.torch.runtime.step.stage import Stage
from autopipe.backends.torch.runtime.step.weight_gradients import WeightGradQueue
from autopipe.backends.torch.torch_interfaces import configure_compiler
from autopipe.ir.errors import ConfigurationError

_LOCAL = {"slice", "along"}
"""Methods of a group that exchange nothing."""
_EAGER = {
    "group": "exchanges between its ranks",
    "weight_grads": "operators whose gradients of weights wait",
}
"""By attribute of a forward's `p`, what no graph can hold."""
_NO_COMPILER = {
    "No working C++ compiler": "install g++, or name a compiler in CXX",
    "Cannot find a working triton": "install triton as torch's wheels for CUDA do, or leave out --compile",
}
"""Words of errors with which every stage would end, and what to do."""


def compile_stages(stages: Mapping[int, Stage], transport: Transport) -> list[str]:
    """Compile this rank's stages, all ranks together, so that no step waits for a compiler: in the
    order of their numbers, since exchanges wait for a stage's group. Returns a line for each stage
    of any rank that is not compiled as one. Raises ConfigurationError where there is no compiler
    for the device.
    """
    _set_up_compiler()
    said = _said_of_stages(stages, transport, _compile)
    transport.traffic.clear()
    return [f"--compile: stage {number} runs {reason}" for number, reason in said]


def _said_of_stages(
    stages: Mapping[int, Stage], transport: Transport, act: Callable[[Stage], str]
) -> list[tuple[int, str]]:
    """Do something with each stage, on all ranks, and give what is said of the stages of any of
    them.
    """

    def run() -> dict[str, str]:
        return {str(number): act(stage) for number, stage in sorted(stages.items())}

    control_group = transport.make_control_group()
    by_rank = control_group.run_collectively("compile", run)
    control_group.close()
    said = {int(number): reason for own in by_rank for number, reason in own.items() if reason}
    return sorted(said.items())


def _set_up_compiler() -> None:
    """From now on no graph holds what waits for other ranks, or for the second half of a backward;
    kernels are kept in one folder for all ranks of a node, which nobody else writes, and nothing
    that is kept is a pickle.
    """
    configure_compiler()
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ and (folder := _cache_folder()) is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    for kind in (Group, WeightGradQueue):
        for name, method in list(vars(kind).items()):
            if (
                isinstance(method, FunctionType)
                and (name == "__call__" or name[0] != "_")
                and name not in _LOCAL
            ):
                setattr(kind, name, torch.compiler.disable(method))


def _compile(stage: Stage) -> str:
    """Compile a stage's forward, or the segments of it that run again. Returns what runs eagerly
    all the same, and why; "" for nothing.
    """
    from autopipe.backends.torch.torch_interfaces import (
        TorchDynamoException,
        Unsupported,
    )  # Takes a second to import.

    forward = stage.module.forward
    segments = [
        (each, each.segment) for each in vars(stage.module).values() if isinstance(each, recompute)
    ]
    functions = [function for _, function in segments] or [forward]
    said = ""
    for fullgraph in (True, False):
        through = partial(torch.compile, dynamic=False, fullgraph=fullgraph)
        for segment, function in segments:
            segment.segment = through(function)
        stage.function = forward if segments else through(forward)
        try:
            stage.rehearse()
            stage.compiled = said
            return said
        except Unsupported as error:
            used = {name for function in functions for name in function.__code__.co_names}
            parts = [part for name, part in _EAGER.items() if name in used] or [_first_line(error)]
            said = f"between compiled parts, eagerly: {', '.join(parts)}"
        except TorchDynamoException as error:
            for words, hint in _NO_COMPILER.items():
                if words in str(error):
                    raise ConfigurationError(
                        f"--compile: {words.lower()} is there", hint
                    ) from error
            said = f"all of it eagerly: {_first_line(error)}"
            break
    for segment, function in segments:
        segment.segment = function
    stage.function = forward
    return said


def _cache_folder() -> Path | None:
    """Beside the answers of plans; None where nothing can be written there."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("AUTOPIPE_CACHE") or Path(caches) / "autopipe") / "kernels"
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
    except OSError:
        return None
    return folder


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
