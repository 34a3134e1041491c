"""Operators of com.microsoft and of ONNX's newest sets, in terms of those that the rest of autopipe
knows.

`operators` spells a node with nodes of the file's own set, `attention` rewrites it with newer ones;
may import ir and the frontend's elements.
"""
