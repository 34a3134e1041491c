"""ONNX's multi-device annotations (IR version 11): a placement written into a model, and read from one."""
