"""How a run trains, besides its optimizer: its data, learning rates by step, clipping and the like,
validation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from autopipe.ir.codec import Above, AtLeast, AtMost, Count, FilePath, Fits, Index, OmitDefault


def is_data_function(path: str) -> bool:
    """True for `module:function`, as against the path of a file or a folder."""
    return re.fullmatch(r"[^\W\d][\w.]*:\w+", path) is not None


def with_path(data: str | None, change: Callable[[str], str]) -> str | None:
    """Return `data` with the path that it is changed by `change`; None and `module:function`
    stay.
    """
    return data if data is None or is_data_function(data) else change(data)


_ON_COMMAND_LINE = "name it on the command line: autopipe launch PROGRAM --data module:function"
DataPath = Annotated[
    str,
    FilePath(
        is_data_function,
        "Python code, which no plan and no configuration may name",
        _ON_COMMAND_LINE,
    ),
    Fits(
        lambda path: not is_data_function(path), "a path (`launch --data` alone names Python code)"
    ),
]
"""A file or a folder with samples. Plans and configurations are not trusted, so that they name no
code.
"""


@dataclass(frozen=True, slots=True)
class DataSettings:
    """Where samples come from and in which order."""

    path: DataPath | None = None
    """File or folder with the data of `launch`. Default: random data. `launch --data` alone names
    Python code.
    """
    shuffle: bool = False
    """Take samples in an order that the seed and the epoch decide; else as they are stored."""
    epochs: Count | None = None
    """Passes through the data, after which training ends, where `launch` has no `--steps`."""
    last_batch: Literal["drop", "pad"] = "drop"
    """Samples at an epoch's end that fill no batch are left out, or trained on with a batch filled
    up by samples that count nothing; that takes a cross-entropy that ignores a label.
    """
    sequence_length: Count | None = None
    """Tokens of a sample of a token file, which is the graph's; another is refused."""


@dataclass(frozen=True, slots=True)
class LRScheduler:
    """The learning rate by step, as a factor of `optimizer.lr`: it warms up, may stay, and
    decays.
    """

    warmup_steps: Annotated[Index, OmitDefault()] = 0
    """Steps in which the rate rises in a straight line, from 0 at the first."""
    decay_type: Annotated[Literal["constant", "linear", "cosine", "sqrt"], OmitDefault()] = (
        "constant"
    )
    """How the rate decays after the warm-up: `linear` and `cosine` are transformers'
    `get_linear_schedule_with_warmup` and `get_cosine_schedule_with_warmup`, `sqrt` is 1 -
    √progress.
    """
    decay_ratio: Annotated[Annotated[float, Above(0), AtMost(1)] | None, OmitDefault()] = None
    """Part of all steps, the last ones, in which the rate decays (WSD), as torchtitan counts: a
    warm-up's first step has 1 / `warmup_steps`. All steps after the warm-up where not given.
    """
    min_lr_factor: Annotated[float, AtLeast(0), AtMost(1), OmitDefault()] = 0.0
    """Where the decay ends, as a factor of `optimizer.lr`."""
    total_steps: Annotated[Annotated[int, AtLeast(1)] | None, OmitDefault()] = None
    """Steps after which the decay has ended; those of the launch where not given."""

    @property
    def needs_steps(self) -> bool:
        """True if the rate depends on how many steps there are in all."""
        return self.decay_type != "constant" and self.total_steps is None

    def factor(self, step: int, steps: int) -> float:
        """Of a step, counted from 0, of a launch of `steps` in all."""
        total = self.total_steps or steps
        warmup = (
            min(self.warmup_steps, total) if self.decay_ratio is not None else self.warmup_steps
        )
        # What transformers counts from 0, torchtitan counts from 1, and its rate is never 0.
        counted = step if self.decay_ratio is None else step + 1
        if step < warmup:
            return counted / warmup
        decay = total - warmup
        if self.decay_ratio is not None:
            decay = min(round(total * self.decay_ratio), decay)
        first = total - decay if self.decay_ratio is None else total + 1 - decay
        if self.decay_type == "constant" or step < first:
            return 1.0
        progress = min(1.0, (counted - first) / max(1, decay))
        left = {
            "linear": 1.0 - progress,
            "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
            "sqrt": 1.0 - math.sqrt(progress),
        }[self.decay_type]
        return self.min_lr_factor + (1.0 - self.min_lr_factor) * left


@dataclass(frozen=True, slots=True)
class Training:
    """Clipping, accumulation and averaging: the rest of an update, besides its optimizer."""

    max_norm: Annotated[Annotated[float, Above(0)] | None, OmitDefault()] = None
    """Norm of all gradients together above which they are scaled down to it, as torch's
    `clip_grad_norm_` does.
    """
    gradient_accumulation_steps: Annotated[int, AtLeast(1), OmitDefault()] = 1
    """Batches whose gradients an update averages: a step takes as many times `batch_size` samples.
    """
    ema_decay: Annotated[Annotated[float, AtLeast(0), AtMost(1)] | None, OmitDefault()] = None
    """Decay of an exponential moving average of the weights, which checkpoints hold beside them;
    none where not given.
    """


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Validation of a training run: the model's loss over data that it is not trained on."""

    data: Annotated[DataPath | None, OmitDefault()] = None
    """File or folder with the data to validate on: all of it, each sample once."""
    interval: Annotated[Count | None, OmitDefault()] = None
    """Steps from one validation to the next; there is one after the last step anyhow."""
    patience: Annotated[Count | None, OmitDefault()] = None
    """The run ends after as many validations in a row without a lower loss; `null` for all its
    steps.
    """
