"""Static shapes for tensors whose number of rows depends on the data.

An operator such as `NonZero` selects elements of a mask. The graph has one row for every element
that could be selected, and the mask marks the selected rows. `domain` defines the facts that are
recorded of each value, `laws` has the rules that derive the facts of a node's results, and
docs/methods/dynamic-shapes.md proves that results and gradients are equal to those of the ONNX
file. This package may import `ir` and the module `inference` of the frontend.
"""
