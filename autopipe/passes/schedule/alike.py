"""A step with one device for all that do the same, and one link for all that carry the same.

The devices of a stage's group with equal orders start and end each task together, whatever a message takes; so do
messages on links between such devices whose messages take equally long. What is left out says nothing new: times are
those of the whole step, to the last bit.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from autopipe.ir.schedule import Lanes, Schedule, lane_groups, lanes_of
from autopipe.ir.timeline import Links, Message, Prediction


@dataclass(frozen=True, slots=True)
class DeviceSymmetry:
    """One simulation for all equal devices: `schedule` has an order a lane, `groups` the lanes of each stage, and
    `prediction` the messages of the first of each of `links`, between devices.
    """

    schedule: Schedule
    groups: tuple[tuple[int, ...], ...]
    prediction: Prediction
    lanes: Lanes
    links: Links


def device_symmetry(
    schedule: Schedule, stage_devices: Sequence[Sequence[int]], prediction: Prediction
) -> DeviceSymmetry:
    """The lanes and links of a step."""
    lanes = lanes_of(stage_devices, schedule.tasks)
    links, messages = _links(lanes, prediction.messages)
    return DeviceSymmetry(
        Schedule(schedule.micro_batches, tuple(schedule.tasks[devices[0]] for devices in lanes)),
        lane_groups(stage_devices, lanes),
        replace(prediction, messages=messages),
        lanes,
        links,
    )


def _links(lanes: Lanes, messages: Sequence[Message]) -> tuple[Links, tuple[Message, ...]]:
    """The pairs of devices by what they exchange, and the messages of the first pair of each kind.

    Both directions count: a link carries activations one way, of some stages, and gradients of others.
    """
    between: dict[tuple[int, int], list[Message]] = {}
    for each in messages:
        between.setdefault((min(each.source, each.target), max(each.source, each.target)), []).append(each)
    lane = {device: index for index, devices in enumerate(lanes) for device in devices}
    found: dict[Hashable, list[tuple[int, int]]] = {}
    for (low, high), carried in between.items():
        # The first message's sender comes first, so that pairs of either order are compared.
        ends = (low, high) if carried[0].source == low else (high, low)
        # A device without tasks is like no other.
        key = *(lane.get(end, ~end) for end in ends), tuple(_content(each, ends[0]) for each in carried)
        found.setdefault(key, []).append(ends)
    firsts = {pairs[0] for pairs in found.values()}
    kept = tuple(each for each in messages if firsts & {(each.source, each.target), (each.target, each.source)})
    return tuple(map(tuple, found.values())), kept


def _content(message: Message, first: int) -> Hashable:
    """A message but for its devices."""
    return replace(message, source=0, target=0), message.source == first
