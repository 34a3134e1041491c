"""Operators as they run on fake CUDA tensors: those that make the host wait, and those that leave
the device.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

ALLOWED = {
    "data/batch_reader.py BatchReader.read": "a batch comes from the host; on a GPU a thread reads it in advance",
    "random_numbers/normal_numbers.py _tables_on": "the table of normal numbers is copied once",
    "random_numbers/random_streams.py Random.begin": "four numbers for each micro-batch that draws",
    "operators/images.py roi_align": "without `sampling_ratio` the regions' sizes say how many numbers are read",
    "step/update.py Update._step_optimizer": "torch's optimizers keep the number of their steps on the host, unless they are fused",
}
"""Places in a step that may copy between host and device, or wait: why."""

_READ = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "unique",
    "bincount",
    "repeat_interleave.Tensor",
    "equal.d",
)
"""Parts of the names of operators that wait for the device, since the host must know numbers or
shapes.
"""
_COPIES = ("aten._to_copy.default", "aten.copy_.default")


class Watcher:
    """Notes, by kind and place, what an operator does that it should not; how often."""

    def __init__(self) -> None:
        self.watching = False
        self.found: Counter[tuple[str, str]] = Counter()

    def note(self, kind: str) -> None:
        """`kind` happens where the innermost of our functions is."""
        if self.watching:
            self.found[kind, place()] += 1

    def see(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """An operator has run."""
        if not self.watching or function.namespace == "c10d":
            return
        name = str(function)
        taken = _tensors((args, kwargs or {}))
        given = _tensors(result)
        devices = {each.device.type for each in (*taken, *given)}
        if any(part in name for part in _READ) and "cuda" in devices:
            self.note(f"{name} waits for the device")
        if (
            "index" in name
            and any(each.dtype is torch.bool for each in taken[1:])
            and "where" not in name
        ):
            self.note(f"{name} waits for the number of true elements")
        if len(devices) > 1:
            way = f"{_types(taken)} to {_types(given)}"
            waiting = "" if (kwargs or {}).get("non_blocking") else " and waits"
            self.note(
                f"copies from {way}{waiting}" if name in _COPIES else f"{name} mixes devices, {way}"
            )
        elif (
            devices == {"cpu"}
            and function.namespace == "aten"
            and "detach" not in name
            and "lift_fresh" not in name
        ):
            self.note(f"{name} runs on the CPU")

    @contextmanager
    def waits_noted(self) -> Iterator[None]:
        """For the length of the block notes calls that wait for a stream or for the device."""
        places = (
            (torch.cuda, "synchronize"),
            (torch.cuda.Event, "synchronize"),
            (torch.cuda.Stream, "synchronize"),
        )
        before = [getattr(owner, name) for owner, name in places]

        def waits(*_: object, **__: object) -> None:
            self.note("waits for the device")

        for owner, name in places:
            setattr(owner, name, waits)
        try:
            yield
        finally:
            for (owner, name), function in zip(places, before, strict=True):
                setattr(owner, name, function)


def _tensors(value: object) -> list[torch.Tensor]:
    return [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]


def _types(tensors: list[torch.Tensor]) -> str:
    return " and ".join(sorted({each.device.type for each in tensors}))


def place() -> str:
    """The innermost line of the package or of generated files that runs now: `file:line
    function`.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        function = frame.f_code.co_qualname
        ours = (
            "backends" in path.parts and "autopipe" in path.parts and "fake_cuda" not in path.parts
        )
        if (
            (ours and path.name != "dry_run.py")
            or path.name.startswith(("stage_", "rank_"))
            or path.name == "<stage>"
        ):
            return f"{path.parent.name}/{path.name}:{frame.f_lineno} {function}"
        frame = frame.f_back
    return "autograd"


def forbidden(found: list[tuple[str, str, int]]) -> list[str]:
    """What was found outside the places that are allowed, a line each."""
    return [
        f"{place}: {kind}, {count} times"
        for kind, place, count in found
        if f"{place.partition(':')[0]} {place.rpartition(' ')[2]}" not in ALLOWED
    ]


def line(**fields: object) -> str:
    return json.dumps(fields) + "\n"
