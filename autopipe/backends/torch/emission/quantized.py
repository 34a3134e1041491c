"""Emission of products and lookups of packed weights, and of mixtures of experts."""

from __future__ import annotations

from autopipe.backends.torch.emission.call import Call, Emitter, called
from autopipe.ir.ops.quantized import DOMAIN, bits_of


def _matmul_nbits(call: Call) -> str:
    optional = [call.optional(index) if index < len(call.codes) else "None" for index in (3, 4)]
    while optional and optional[-1] == "None":
        optional.pop()
    return called("operators.matmul_nbits", call.args(3), *optional, bits=bits_of(call))


def _gather_blocks(call: Call) -> str:
    return called("operators.gather_blocks", call.args(3), call.optional(3), call.group("v"), bits=bits_of(call))


QUANTIZED: dict[str, Emitter] = {
    f"{DOMAIN}MatMulNBits": _matmul_nbits,
    f"{DOMAIN}GatherBlockQuantized": _gather_blocks,
}
