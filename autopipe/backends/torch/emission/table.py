"""All emitters, assembled from the families."""

from __future__ import annotations

from autopipe.backends.torch.emission.call import Emitter
from autopipe.backends.torch.emission.elementwise import ELEMENTWISE
from autopipe.backends.torch.emission.products import PRODUCTS

EMITTERS: dict[str, Emitter] = {**ELEMENTWISE, **PRODUCTS}
