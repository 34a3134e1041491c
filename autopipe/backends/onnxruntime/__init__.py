"""ONNX Runtime: reference execution."""
