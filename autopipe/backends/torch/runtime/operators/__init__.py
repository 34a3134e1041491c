"""Operators that take more than one expression of torch. Generated code calls them as
`operators.NAME`.

From the runtime, the modules of this package import process groups and random streams only.
"""

from __future__ import annotations

from typing import Any

from autopipe.backends.torch.runtime.deprecated import NEW_OPERATOR_NAMES, warn_of_old_name
from autopipe.backends.torch.runtime.operators.attention import *  # noqa: F403
from autopipe.backends.torch.runtime.operators.experts import *  # noqa: F403
from autopipe.backends.torch.runtime.operators.gated import *  # noqa: F403
from autopipe.backends.torch.runtime.operators.images import *  # noqa: F403
from autopipe.backends.torch.runtime.operators.linear_attention import *  # noqa: F403
from autopipe.backends.torch.runtime.operators.linear_cross_entropy import *  # noqa: F403
from autopipe.backends.torch.runtime.operators.onnx_operators import *  # noqa: F403
from autopipe.backends.torch.runtime.operators.quantized import *  # noqa: F403
from autopipe.backends.torch.runtime.operators.recurrent import *  # noqa: F403
from autopipe.backends.torch.runtime.operators.sharded import *  # noqa: F403
from autopipe.backends.torch.runtime.operators.subbyte import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Return the operator with an old name, which programs of the previous release use, and warn
    about the name.
    """
    if name not in NEW_OPERATOR_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warn_of_old_name(f"operators.{name}", f"operators.{NEW_OPERATOR_NAMES[name]}")
    found = globals()[name] = globals()[NEW_OPERATOR_NAMES[name]]
    return found
