"""Operators that are replaced while a file is read: those of ONNX Runtime (domains com.microsoft
and com.microsoft.nchwc), classical ones (ai.onnx.ml), and FlexAttention (ai.onnx.preview).

`registry` has the table of all decompositions. May import ir, the frontend's elements and rewriter.
"""
