"""Reading ONNX: an untrusted file becomes a typed, cleaned graph whose weights stay where they are.

`read` has the steps in their order; may import ir alone.
"""

from autopipe.passes.frontend.load import Source
from autopipe.passes.frontend.loss import CrossEntropy
from autopipe.passes.frontend.model import Model, Unsupported
from autopipe.passes.frontend.read import read_model

__all__ = ["CrossEntropy", "Model", "Source", "Unsupported", "read_model"]
