"""autopipe: from an ONNX model to one readable PyTorch program per device."""

__version__ = "0.1.0"
