"""autopipe: from an ONNX model to one readable PyTorch program per device."""

from __future__ import annotations

from autopipe.ir import VERSION

__version__ = VERSION

# Nothing of Python's is imported here: `python -m autopipe` comes here first, and would find a
# `typing.py` that lies in the current folder.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from autopipe.api.interface import Plan, export, plan

__all__ = ["Plan", "export", "plan"]


def __getattr__(name: str) -> object:
    """Return a name of the Python interface. The interface is imported at its first use, because
    the programs of ranks import this package without it.
    """
    if name in __all__:
        from autopipe.api import interface

        return getattr(interface, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
