"""The part of autopipe that generated programs import: ranks, stages, operators and all that they
stand on. Imports autopipe.ir, the format of checkpoints and torch; no solver, no onnx. Torch is
loaded with the names below, so that the launcher can check data and manifests, which takes a
moment, without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopipe.backends.torch.runtime.rank import Rank
    from autopipe.backends.torch.runtime.step.stage import Data, Labels, Loss, Receive, Send

__all__ = ["Data", "Labels", "Loss", "Rank", "Receive", "Send"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from autopipe.backends.torch.runtime import rank
        from autopipe.backends.torch.runtime.step import stage

        return rank.Rank if name == "Rank" else getattr(stage, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
