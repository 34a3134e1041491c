"""Emission of recurrent layers: calls of the runtime, which uses torch's fused layers where they fit."""

from __future__ import annotations

from autopipe.backends.torch.emission.call import Call, Emitter, number

_OPERANDS = ("x", "weight", "recurrence", "bias", "lengths", "hidden", "cell", "peepholes")

_USUAL = {"RNN": ("tanh",), "GRU": ("sigmoid", "tanh"), "LSTM": ("sigmoid", "tanh", "tanh")}
"""Activations of one direction where none are stated."""


def _recurrent(function: str) -> Emitter:
    def emit(call: Call) -> str:
        words = [call.arg(index) for index in range(3)]
        words += [f"{_OPERANDS[index]}={call.arg(index)}" for index in range(3, len(call.codes)) if call.present(index)]
        words += _settings(call)
        if call.is_split("h"):
            words.append(f"group={call.group('h')}")
        code = f"operators.{function}({', '.join(words)})"
        count = len(call.node.outputs)
        return f"{code}[0]" if count == 1 else f"{code}[:{count}]"

    return emit


def _settings(call: Call) -> list[str]:
    """Attributes that differ from their defaults, as keywords."""
    node = call.node
    words = []
    if node.text("direction", "forward") != "forward":
        words.append(f"direction={node.text('direction')!r}")
    activations = tuple(name.lower() for name in node.texts("activations"))
    if activations and activations != _USUAL[node.op] * (len(activations) // len(_USUAL[node.op])):
        words.append(f"activations={activations!r}")
    for name in ("activation_alpha", "activation_beta"):
        if node.numbers(name):
            words.append(f"{name.removeprefix('activation_')}=({', '.join(map(number, node.numbers(name)))},)")
    if node.has("clip"):
        words.append(f"clip={number(node.number('clip'))}")
    flags = {"linear_before_reset": "reset_after", "input_forget": "coupled", "layout": "batch_first"}
    words += [f"{word}=True" for name, word in flags.items() if node.integer(name)]
    return words


RECURRENT: dict[str, Emitter] = {name: _recurrent(name.lower()) for name in ("RNN", "GRU", "LSTM")}
