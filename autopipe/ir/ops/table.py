"""All rows, assembled from the families."""

from __future__ import annotations

from autopipe.ir.ops.elementwise import ELEMENTWISE
from autopipe.ir.ops.products import PRODUCTS
from autopipe.ir.ops.row import Operator

OPERATORS: dict[str, Operator] = {row.name: row for row in (*ELEMENTWISE, *PRODUCTS)}
