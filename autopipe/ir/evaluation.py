"""Settings of the validation that a training run makes on its way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from autopipe.ir.codec import Count, FilePath, Fits, Sparse
from autopipe.ir.program import is_data_function


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Validation of a training run: the model's loss over data that it is not trained on."""

    data: Annotated[
        Annotated[str, Fits(is_data_function, "`module:function`")] | Annotated[str, FilePath()] | None, Sparse()
    ] = None
    """Data to validate on, as `launch --data` takes it: all of it, each sample once."""
    interval: Annotated[Count | None, Sparse()] = None
    """Steps from one validation to the next; there is one after the last step anyhow."""
    patience: Annotated[Count | None, Sparse()] = None
    """The run ends after as many validations in a row without a lower loss; `null` for all its steps."""
