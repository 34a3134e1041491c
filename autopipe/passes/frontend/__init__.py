"""Reading ONNX: an untrusted file becomes a typed, cleaned graph whose weights stay where they are."""

from autopipe.passes.frontend.load import Source
from autopipe.passes.frontend.model import Model, Unsupported
from autopipe.passes.frontend.read import CrossEntropy, read_model, survey_model

__all__ = ["CrossEntropy", "Model", "Source", "Unsupported", "read_model", "survey_model"]
