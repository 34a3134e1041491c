"""All rows, assembled from the families."""

from __future__ import annotations

from autopipe.ir.ops.activation import ACTIVATION
from autopipe.ir.ops.attention import ATTENTION
from autopipe.ir.ops.contrib import CONTRIB
from autopipe.ir.ops.convolution import CONVOLUTION
from autopipe.ir.ops.elementwise import ELEMENTWISE
from autopipe.ir.ops.generation import GENERATION
from autopipe.ir.ops.indexing import INDEXING
from autopipe.ir.ops.losses import LOSSES
from autopipe.ir.ops.movement import MOVEMENT
from autopipe.ir.ops.normalization import NORMALIZATION
from autopipe.ir.ops.pooling import POOLING
from autopipe.ir.ops.products import PRODUCTS
from autopipe.ir.ops.quantization import QUANTIZATION
from autopipe.ir.ops.randomness import RANDOM
from autopipe.ir.ops.recurrent import RECURRENT
from autopipe.ir.ops.reduction import REDUCTION
from autopipe.ir.ops.regions import REGIONS
from autopipe.ir.ops.regroup import REGROUP
from autopipe.ir.ops.resize import RESIZE
from autopipe.ir.ops.row import Operator
from autopipe.ir.ops.sampling import SAMPLING
from autopipe.ir.ops.spectral import SPECTRAL

OPERATORS: dict[str, Operator] = {
    row.name: row
    for row in (
        *ACTIVATION,
        *ELEMENTWISE,
        *GENERATION,
        *INDEXING,
        *MOVEMENT,
        *CONVOLUTION,
        *POOLING,
        *QUANTIZATION,
        *NORMALIZATION,
        *LOSSES,
        *ATTENTION,
        *RECURRENT,
        *RESIZE,
        *CONTRIB,
        *REGIONS,
        *PRODUCTS,
        *REDUCTION,
        *REGROUP,
        *SAMPLING,
        *SPECTRAL,
        *RANDOM,
    )
}
