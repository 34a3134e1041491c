"""Reading of ONNX models. An untrusted file becomes a graph whose values have types and static
shapes. The weights stay in the file.

The module `read` runs the steps in order. Of autopipe's other packages, this package may import
only `autopipe.ir`.
"""

from autopipe.passes.frontend.load import Source
from autopipe.passes.frontend.loss import CrossEntropy
from autopipe.passes.frontend.model import Model, Unsupported
from autopipe.passes.frontend.read import read_model

__all__ = ["CrossEntropy", "Model", "Source", "Unsupported", "read_model"]
