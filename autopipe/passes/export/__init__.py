"""Trained numbers put back into a copy of the ONNX file they were trained from."""

from autopipe.passes.export.numbers import Numbers
from autopipe.passes.export.write import WrittenFiles, write_trained

__all__ = ["Numbers", "WrittenFiles", "write_trained"]
