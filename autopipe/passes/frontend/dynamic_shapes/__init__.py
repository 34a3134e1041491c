"""Static shapes for tensors whose number of rows depends on the data.

An operator such as `NonZero` selects elements of a mask. The graph has one row for every element
that could be selected, and the mask marks the selected rows. `domain` defines what is recorded of
each value, `laws` has one law per operator class, and docs/methods/dynamic-shapes.md proves that
results and gradients are equal to those of the ONNX file. May import ir and the frontend's
inference.
"""
