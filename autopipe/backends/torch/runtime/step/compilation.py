"""`--compile`: runs forward and backward of stages through `torch.compile`.

Before the first step, each stage runs a micro-batch of zeros, so that it is compiled and no step
waits for the compiler. Collectives and operators with deferred weight gradients are not compiled;
they run eagerly between compiled parts of a stage.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch

from autopipe.backends.torch.runtime.communication.collectives import Group
from autopipe.backends.torch.runtime.communication.transport import Transport
from autopipe.backends.torch.runtime.recompute import recompute
from autopipe.backends.torch.runtime.step.forward_parts import divide_forward
from autopipe.backends.torch.runtime.step.stage import Stage
from autopipe.backends.torch.runtime.step.weight_gradients import WeightGradQueue
from autopipe.backends.torch.torch_interfaces import configure_compiler
from autopipe.ir.errors import ConfigurationError

_LOCAL_GROUP_METHODS = {"slice", "along"}
"""Public methods of `Group` that do not communicate, so that torch may compile them."""
_UNCOMPILED_CALLS = {
    "group": "exchanges between its ranks",
    "weight_grads": "operators whose gradients of weights wait",
}
"""Descriptions, for the user, of calls that cannot be compiled. The keys are the attributes of `p`,
the first argument of a stage's forward, through which these calls are made.
"""
_COMPILER_HINTS = {
    "No working C++ compiler": "install g++, or name a compiler in CXX",
    "Cannot find a working triton": (
        "install triton as torch's wheels for CUDA do, or leave out --compile"
    ),
}
"""Hints for the user, by a part of an error message of the compiler. These errors do not depend on
the stage: on this machine, the compilation of any stage would raise them.
"""


def compile_stages(stages: Mapping[int, Stage], transport: Transport) -> list[str]:
    """Compile the stages of this rank, by their number, in ascending order. Collective over all
    ranks, because the forward of a stage may communicate within its group.

    Return a line for the user for each stage of any rank that is not compiled as one graph. Raise
    ConfigurationError if torch finds no working compiler for the device.
    """
    _set_up_compiler()
    said = _collect_stage_texts(stages, transport, _compile_stage)
    transport.traffic.clear()
    return [f"--compile: stage {number} runs {reason}" for number, reason in said]


def _collect_stage_texts(
    stages: Mapping[int, Stage], transport: Transport, act: Callable[[Stage], str]
) -> list[tuple[int, str]]:
    """Call `act` with each stage on its ranks. Return (number of the stage, text) for each stage of
    any rank for which `act` returned a text that is not empty. Collective over all ranks.
    """

    def run() -> dict[str, str]:
        """Call `act` with the stages of this rank. Return the texts by stage number."""
        return {str(number): act(stage) for number, stage in sorted(stages.items())}

    control_group = transport.make_control_group()
    by_rank = control_group.run_collectively("compile", run)
    control_group.close()
    said = {int(number): reason for own in by_rank for number, reason in own.items() if reason}
    return sorted(said.items())


def _set_up_compiler() -> None:
    """Prepare torch.compile in this process: exclude collectives and deferred weight gradients from
    compilation, and select the folder of compiled kernels. The ranks of one user on a machine share
    the folder, which only this user can write.
    """
    configure_compiler()
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ and (folder := _cache_folder()) is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    for kind in (Group, WeightGradQueue):
        for name, method in list(vars(kind).items()):
            if (
                isinstance(method, FunctionType)
                and (name == "__call__" or name[0] != "_")
                and name not in _LOCAL_GROUP_METHODS
            ):
                setattr(kind, name, torch.compiler.disable(method))


def _compile_stage(stage: Stage) -> str:
    """Compile a stage's forward, or only its recomputed segments if it has any. Return which parts
    run eagerly and why, "" if none does.

    A function that several layers share is compiled once (`forward_parts`). torch's
    `nested_compile_region` has the same purpose, but its gradients were wrong on CPUs (torch 2.13).
    """
    # The import is in the function, because it takes about a second.
    from autopipe.backends.torch.torch_interfaces import (
        TorchDynamoException,
        Unsupported,
    )

    module = stage.module
    forward = module.forward
    segments = [each for each in vars(module).values() if isinstance(each, recompute)]
    originals = {each: each.segment for each in segments}
    layers = _layer_functions(module)
    parts: dict[str, FunctionType] = {}
    divided = forward
    if layers:
        names = divide_forward(inspect.getsource(module), layers)
        divided = names.define(vars(module))
        parts = layers | {name: vars(module)[name] for name in names.parts}
    functions: list[Any] = [*originals.values(), *parts.values()] or [forward]
    said = ""
    for fullgraph in (True, False):
        through = partial(torch.compile, dynamic=False, fullgraph=fullgraph)
        for segment, function in originals.items():
            segment.segment = through(function)
        for name, function in parts.items():
            setattr(module, name, through(function))
        stage.function = divided if segments or parts else through(forward)
        try:
            stage.run_on_zeros()
            stage.compiled = said
            return said
        except Unsupported as error:
            used = {name for function in functions for name in function.__code__.co_names}
            eager = [text for name, text in _UNCOMPILED_CALLS.items() if name in used] or [
                _first_line(error)
            ]
            said = f"between compiled parts, eagerly: {', '.join(eager)}"
        except TorchDynamoException as error:
            for words, hint in _COMPILER_HINTS.items():
                if words in str(error):
                    raise ConfigurationError(
                        f"--compile: {words[0].lower()}{words[1:]}", hint
                    ) from error
            said = f"all of it eagerly: {_first_line(error)}"
            break
    for segment, function in originals.items():
        segment.segment = function
    for name, layer in layers.items():
        setattr(module, name, layer)
    stage.function = forward
    return said


def _layer_functions(module: ModuleType) -> dict[str, FunctionType]:
    """Return the functions of the layers of a stage, by name, given the stage's generated module.
    Functions that backward recomputes and functions of loop operators are omitted.
    """
    return {
        name: each
        for name, each in vars(module).items()
        if isinstance(each, FunctionType)
        and each.__module__ == module.__name__
        and name != "forward"
        and not name.startswith("loop_")
    }


def _cache_folder() -> Path | None:
    """Return the folder of compiled kernels, next to autopipe's cache of plans. Create it if
    necessary. None if it cannot be created.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("AUTOPIPE_CACHE") or Path(caches) / "autopipe") / "kernels"
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
    except OSError:
        return None
    return folder


def _first_line(error: Exception) -> str:
    """Return the first line of the error's message, or the name of its type if the message is
    empty.
    """
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
