"""Where programs run: `torch` writes, launches and verifies them, `onnxruntime` is the reference
that they are held to.

It imports ir alone: passes and backends meet only through data and files.
"""
