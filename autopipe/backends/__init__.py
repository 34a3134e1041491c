"""Backends that execute models: `torch` generates, launches and verifies PyTorch programs;
`onnxruntime` runs the original ONNX model as the reference of the verification.

Backends import only `autopipe.ir` of autopipe's other packages. They exchange only data and files
with the planning passes.
"""
