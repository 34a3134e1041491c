"""Reading of ONNX models: an untrusted file becomes a graph of typed values with static shapes. The
weights stay in the file.

`read` has the steps in order. May import only ir.
"""

from autopipe.passes.frontend.load import Source
from autopipe.passes.frontend.loss import CrossEntropy
from autopipe.passes.frontend.model import Model, Unsupported
from autopipe.passes.frontend.read import read_model

__all__ = ["CrossEntropy", "Model", "Source", "Unsupported", "read_model"]
