"""The part of autopipe that generated programs import: ranks, stages and operators.

The package imports `autopipe.ir`, the checkpoint format and torch, but no solver and not onnx.
`__getattr__` imports a public name, and with it torch, at the first use of the name. So the
launcher can check data and manifests without waiting for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopipe.backends.torch.runtime.rank import Rank
    from autopipe.backends.torch.runtime.step.ports import Data, Labels, Loss, Recv, Send

__all__ = ["Data", "Labels", "Loss", "Rank", "Recv", "Send"]


def __getattr__(name: str) -> Any:
    if name == "Receive":
        from autopipe.backends.torch.runtime.deprecated import warn_of_old_name

        warn_of_old_name("runtime.Receive", "runtime.Recv")
        name = "Recv"
    if name in __all__:
        from autopipe.backends.torch.runtime import rank
        from autopipe.backends.torch.runtime.step import ports

        return rank.Rank if name == "Rank" else getattr(ports, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
