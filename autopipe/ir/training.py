"""Settings of a training run besides the optimizer: data, learning rate schedule, gradient
clipping, weight averaging and validation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from autopipe.ir.codec import Above, AtLeast, AtMost, Count, FilePath, Index, OmitDefault, Predicate


def is_data_function(path: str) -> bool:
    """Return True if `path` has the form `module:function`, and False if it is the path of a file
    or folder.
    """
    return re.fullmatch(r"[^\W\d][\w.]*:\w+", path) is not None


def change_data_path(data: str | None, change: Callable[[str], str]) -> str | None:
    """Return `change(data)` if `data` is a path. Return None and the form `module:function`
    unchanged.
    """
    return data if data is None or is_data_function(data) else change(data)


_COMMAND_LINE_HINT = "name it on the command line: autopipe launch PROGRAM --data module:function"
DataPath = Annotated[
    str,
    FilePath(
        is_data_function,
        "Python code, which plans and configurations must not name",
        _COMMAND_LINE_HINT,
    ),
    Predicate(
        lambda path: not is_data_function(path), "a path (only `launch --data` accepts Python code)"
    ),
]
"""Path of a file or folder with samples. Python code is rejected, because plans and configurations
are untrusted.
"""


@dataclass(frozen=True, slots=True)
class DataSettings:
    """Source and order of samples."""

    path: DataPath | None = None
    """File or folder with the data of `launch`. Default: random data. Only `launch --data` accepts
    Python code.
    """
    shuffle: bool = False
    """`true` reads samples in a random order that depends on seed and epoch; `false` in file
    order.
    """
    epochs: Count | None = None
    """Number of passes through the data after which training ends, unless `launch` has
    `--steps`.
    """
    last_batch: Literal["drop", "pad"] = "drop"
    """Handling of an incomplete batch at the end of an epoch. `drop` skips its samples. `pad` adds
    filler samples with ignored labels, which requires a cross-entropy with an ignored label.
    """
    sequence_length: Count | None = None
    """Tokens per sample of a token file. It must equal the sequence length of the graph."""


@dataclass(frozen=True, slots=True)
class LRScheduler:
    """Learning rate per step, as a factor of `optimizer.lr`: warm-up, constant part, decay."""

    warmup_steps: Annotated[Index, OmitDefault()] = 0
    """Number of steps in which the rate increases linearly, from 0 in the first step."""
    decay_type: Annotated[Literal["constant", "linear", "cosine", "sqrt"], OmitDefault()] = (
        "constant"
    )
    """Decay of the rate after the warm-up. `linear` and `cosine` equal
    `get_linear_schedule_with_warmup` and `get_cosine_schedule_with_warmup` of transformers. `sqrt`
    is 1 - √progress.
    """
    decay_ratio: Annotated[Annotated[float, Above(0), AtMost(1)] | None, OmitDefault()] = None
    """Fraction of all steps, at the end, in which the rate decays (WSD). If it is set, steps count
    as in torchtitan: the first warm-up step has the factor 1 / `warmup_steps`. Default: all steps
    after the warm-up.
    """
    min_lr_factor: Annotated[float, AtLeast(0), AtMost(1), OmitDefault()] = 0.0
    """Rate at the end of the decay, as a factor of `optimizer.lr`."""
    total_steps: Annotated[Annotated[int, AtLeast(1)] | None, OmitDefault()] = None
    """Step at which the decay ends. Default: the number of steps of the launch."""

    @property
    def needs_steps(self) -> bool:
        """True if the learning rate depends on the number of steps of the launch."""
        return self.decay_type != "constant" and self.total_steps is None

    def factor(self, step: int, steps: int) -> float:
        """Return the learning rate as a factor of `optimizer.lr` in step `step` (counted from 0) of
        a launch with `steps` steps.
        """
        total = self.total_steps or steps
        warmup = (
            min(self.warmup_steps, total) if self.decay_ratio is not None else self.warmup_steps
        )
        # transformers counts steps from 0. torchtitan, whose schedules have a `decay_ratio`, counts
        # steps from 1, so its first warm-up step has a rate above 0.
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
    """Gradient clipping, gradient accumulation and weight averaging."""

    max_norm: Annotated[Annotated[float, Above(0)] | None, OmitDefault()] = None
    """Maximum norm of all gradients together, as in `torch.nn.utils.clip_grad_norm_`. Default: no
    clipping.
    """
    gradient_accumulation_steps: Annotated[int, AtLeast(1), OmitDefault()] = 1
    """Number of batches whose gradients one update averages. A step has this number times
    `batch_size` samples.
    """
    ema_decay: Annotated[Annotated[float, AtLeast(0), AtMost(1)] | None, OmitDefault()] = None
    """Decay of an exponential moving average of the weights, which checkpoints contain too.
    Default: no average.
    """


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Validation of a training run: the loss on data that is not used for training."""

    data: Annotated[DataPath | None, OmitDefault()] = None
    """File or folder with the validation data. A validation reads each sample once."""
    interval: Annotated[Count | None, OmitDefault()] = None
    """Steps between validations. There is also one after the last step."""
    patience: Annotated[Count | None, OmitDefault()] = None
    """Number of consecutive validations without a lower loss after which the run ends; `null` to
    run all steps.
    """
