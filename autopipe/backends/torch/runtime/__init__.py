"""The module that generated programs import: this and torch, nothing else of autopipe.

Torch is loaded with the rank, so that the launcher can check data and manifests, which take a moment, without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autopipe.backends.torch.runtime.stage_io import Data, Loss, Receive, Send

if TYPE_CHECKING:
    from autopipe.backends.torch.runtime.rank import Rank

__all__ = ["Data", "Loss", "Rank", "Receive", "Send"]


def __getattr__(name: str) -> Any:
    if name == "Rank":
        from autopipe.backends.torch.runtime.rank import Rank

        return Rank
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
