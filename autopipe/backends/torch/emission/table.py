"""All emitters, assembled from the families."""

from __future__ import annotations

from autopipe.backends.torch.emission.activation import ACTIVATION
from autopipe.backends.torch.emission.attention import ATTENTION
from autopipe.backends.torch.emission.call import Emitter
from autopipe.backends.torch.emission.contrib import CONTRIB
from autopipe.backends.torch.emission.convolution import CONVOLUTION
from autopipe.backends.torch.emission.elementwise import ELEMENTWISE
from autopipe.backends.torch.emission.generation import GENERATION
from autopipe.backends.torch.emission.indexing import INDEXING
from autopipe.backends.torch.emission.losses import LOSSES
from autopipe.backends.torch.emission.movement import MOVEMENT
from autopipe.backends.torch.emission.normalization import NORMALIZATION
from autopipe.backends.torch.emission.pooling import POOLING
from autopipe.backends.torch.emission.products import PRODUCTS
from autopipe.backends.torch.emission.quantization import QUANTIZATION
from autopipe.backends.torch.emission.randomness import RANDOM
from autopipe.backends.torch.emission.recurrent import RECURRENT
from autopipe.backends.torch.emission.reduction import REDUCTION
from autopipe.backends.torch.emission.regions import REGIONS
from autopipe.backends.torch.emission.regroup import REGROUP
from autopipe.backends.torch.emission.resize import RESIZE
from autopipe.backends.torch.emission.sampling import SAMPLING
from autopipe.backends.torch.emission.spectral import SPECTRAL

EMITTERS: dict[str, Emitter] = {
    **ACTIVATION,
    **ELEMENTWISE,
    **GENERATION,
    **INDEXING,
    **MOVEMENT,
    **CONVOLUTION,
    **POOLING,
    **QUANTIZATION,
    **NORMALIZATION,
    **LOSSES,
    **ATTENTION,
    **RECURRENT,
    **RESIZE,
    **CONTRIB,
    **REGIONS,
    **PRODUCTS,
    **REDUCTION,
    **REGROUP,
    **SAMPLING,
    **SPECTRAL,
    **RANDOM,
}
