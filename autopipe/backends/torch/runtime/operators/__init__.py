"""Operators that torch spells with more than one expression; generated code calls them by name.
They import torch, and of the runtime groups of ranks and streams of random numbers.
"""

from autopipe.backends.torch.runtime.operators.attention import *  # noqa: F403
from autopipe.backends.torch.runtime.operators.experts import *  # noqa: F403
from autopipe.backends.torch.runtime.operators.gated import *  # noqa: F403
from autopipe.backends.torch.runtime.operators.images import *  # noqa: F403
from autopipe.backends.torch.runtime.operators.linear_attention import *  # noqa: F403
from autopipe.backends.torch.runtime.operators.linear_cross_entropy import *  # noqa: F403
from autopipe.backends.torch.runtime.operators.misc import *  # noqa: F403
from autopipe.backends.torch.runtime.operators.quantized import *  # noqa: F403
from autopipe.backends.torch.runtime.operators.recurrent import *  # noqa: F403
from autopipe.backends.torch.runtime.operators.sharded import *  # noqa: F403
from autopipe.backends.torch.runtime.operators.subbyte import *  # noqa: F403
