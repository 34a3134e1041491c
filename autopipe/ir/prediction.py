"""Predicted times of a plan's stages and messages: the input of the simulated step."""

from __future__ import annotations

from dataclasses import dataclass

from autopipe.ir.schedule import Phase
from autopipe.ir.turn import MicroBatchSlice


@dataclass(frozen=True, slots=True)
class StagePrediction:
    """Predicted times of a stage on each of its devices, for one micro-batch where nothing else is said."""

    forward_s: float
    backward_s: float = 0.0
    """Seconds of a backward, with the forward that recomputation runs again."""
    input_gradient_s: float = 0.0
    """Seconds of a split backward's first half, which gives the gradients of what the stage received."""
    weight_gradient_s: float = 0.0
    """Seconds of its second half, which gives the gradients of parameters."""
    split_s: float = 0.0
    """Seconds more that a micro-batch takes because its backward is split, most of them in the forward and in the first
    half: they count with the first half."""
    gradient_s: float = 0.0
    """Seconds, once a step, in which gradients are summed over devices."""
    update_s: float = 0.0
    """Seconds of the optimizer's step."""
    parameter_bytes: int = 0
    static_bytes: int = 0
    """Bytes there all through a step: parameters, gradients, optimizer state, message buffers."""
    kept_bytes: int = 0
    """Bytes held from the start of a forward to the end of its backward."""
    weight_kept_bytes: int = 0
    """Bytes that a split backward's second half needs: held from the end of the first to its own end."""
    transient_bytes: int = 0
    """Bytes that come and go within a backward or, without training, a forward."""

    def seconds(self, phase: Phase) -> float:
        """Length of a task."""
        match phase:
            case Phase.FORWARD:
                return self.forward_s
            case Phase.BACKWARD:
                return self.backward_s
            case Phase.INPUT_GRADIENT:
                return self.input_gradient_s + self.split_s
            case Phase.WEIGHT_GRADIENT:
                return self.weight_gradient_s


_EVERY = MicroBatchSlice()


@dataclass(frozen=True, slots=True)
class Message:
    """Message from a device of one stage to a device of a later one after a forward; its gradient comes back after the
    backward. Where the stages have micro-batches of different sizes it is for the samples that those of one slice of
    the source and those of one slice of the target have in common: the number of the message is the same for both.
    """

    source_stage: int
    target_stage: int
    source: int
    target: int
    forward_bytes: int
    backward_bytes: int
    forward_s: float
    backward_s: float
    source_turn: MicroBatchSlice = _EVERY
    target_turn: MicroBatchSlice = _EVERY


@dataclass(frozen=True, slots=True)
class Prediction:
    """Stages in order, and the messages of one micro-batch: of the largest, where stages have different ones."""

    stages: tuple[StagePrediction, ...] = ()
    messages: tuple[Message, ...] = ()

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """The edges of the stage graph, sorted, each once."""
        return tuple(sorted({(each.source_stage, each.target_stage) for each in self.messages}))
