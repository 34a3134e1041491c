"""Backends that run programs. `torch` generates, launches and verifies programs; `onnxruntime` runs
the original model as the reference for verification.

Backends import only `autopipe.ir` of autopipe's other packages. Passes and backends exchange data
and files only.
"""
