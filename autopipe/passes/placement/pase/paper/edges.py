"""Cost of moving a tensor from one layer to the next under the paper's model."""

from __future__ import annotations

import numpy as np

from autopipe.passes.placement.pase.paper.configurations import Degrees
from autopipe.passes.placement.pase.paper.costs import Floats


def transfer(extents: tuple[int, ...], source: Degrees, target: Degrees, rate: float) -> Floats:
    """2 r · max(0, |target's part| − |overlap|), forward and backward; [source configurations, target configurations].

    `source` and `target` are the parts of each dimension of the tensor, [configurations, dimensions]. Parts are taken
    to lie as well as they can; where the target is on more devices than the source, some device has no overlap.
    """
    sizes = np.array(extents, dtype=np.float64)
    have, want = sizes / source, sizes / target
    overlap = np.ones((len(source), len(target)))
    for dimension in range(len(extents)):
        overlap *= np.minimum(have[:, None, dimension], want[None, :, dimension])
    overlap[source.prod(axis=1)[:, None] < target.prod(axis=1)[None, :]] = 0.0
    return np.asarray(2.0 * rate * np.maximum(want.prod(axis=1)[None, :] - overlap, 0.0))
