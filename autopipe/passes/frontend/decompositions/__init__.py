"""Decompositions: functions that replace a node of the file by nodes of standard ONNX operators,
while the file is read. They cover operators of ONNX Runtime (domains com.microsoft and
com.microsoft.nchwc), classical ones (ai.onnx.ml), and FlexAttention (ai.onnx.preview).

`registry` has the table of all decompositions. This package may import `ir`, and the modules
`elements` and `rewriter` of the frontend.
"""
