"""Neighbouring operators that torch computes in one: found on the operations of a stage, just before they are printed.

The graph keeps them apart, because apart they can be split: a bias added to partial sums would count several times.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from autopipe.ir.ops.products import is_matrix_product, takes_bias
from autopipe.ir.program import Collective, Compute, Operation, StageCode

LINEAR = "Linear"
"""Operator type of a product and the bias added to it; operands x, weight [in, out], bias [out]."""


def merge_neighbours(stage: StageCode) -> StageCode:
    """The same stage with products and their biases as one operation, where nothing else reads the product."""
    reads = Counter(name for operation in stage.operations for name in operation.reads)
    reads.update(value.name for value in stage.outputs)
    products = {
        operation.signature.result().name: operation
        for operation in stage.operations
        if isinstance(operation, Compute) and is_matrix_product(operation.signature)
    }
    merged: set[str] = set()
    operations: list[Operation] = []
    for operation in stage.operations:
        product = _product_under(operation, products, reads)
        if product is not None and isinstance(operation, Compute):
            operations.append(_linear(product, operation))
            merged.add(product.signature.result().name)
        else:
            operations.append(operation)
    kept = (each for each in operations if isinstance(each, Collective) or _first_result(each) not in merged)
    return replace(stage, operations=tuple(kept))


def _first_result(operation: Compute) -> str | None:
    result = operation.signature.results[0]
    return None if result is None else result.name


def _product_under(operation: Operation, products: dict[str, Compute], reads: Counter[str]) -> Compute | None:
    """The product to which `operation` adds a bias, if that is all it does and nothing else reads the product."""
    if not isinstance(operation, Compute) or operation.signature.node.op != "Add" or operation.signature.node.domain:
        return None
    first, second = operation.signature.operand(0), operation.signature.operand(1)
    for product, bias in ((first, second), (second, first)):
        found = products.get(product.name)
        if found is not None and reads[product.name] == 1 and takes_bias(product, bias):
            return found
    return None


def _linear(product: Compute, addition: Compute) -> Compute:
    """Both as one, the product's node: named after the addition, whose result it gives."""
    result = product.signature.result().name
    bias = next(value for value in addition.signature.operands if value is not None and value.name != result)
    signature = replace(
        addition.signature,
        node=replace(addition.signature.node, op=LINEAR, domain="autopipe"),
        operands=(*product.signature.operands, bias),
        constants=(None, None, None),
    )
    return replace(addition, node=product.node, signature=signature)
