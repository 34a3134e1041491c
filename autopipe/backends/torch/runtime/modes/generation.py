"""Generating tokens with a decoder over the ranks of a program.

A micro-batch is a group of sequences: while one stage is at a group, the next is at the group
before. A layer's keys and values stay on the ranks that computed them, each its own block. A new
token goes from the rank that has the logits to all others; what else a step reads (tokens, mask,
positions) each rank knows from those.

Programs have static shapes: one feeds a token a step, a second one beside it many of each prompt. A
sequence's cached tokens lie at the end of the cache's places and those before are masked; those
that a step feeds come first in it and those behind are not kept. So sequences of different lengths,
those that have ended, and prompts that are fed piece by piece are rows of one batch. In a cache
that is written in place they lie at its front, and what a step writes behind its last token is
written over by the next.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from autopipe.backends.torch.runtime.data.batch_reader import BatchReader, BlockRequest
from autopipe.backends.torch.runtime.data.outputs import needed_shards
from autopipe.backends.torch.runtime.modes.decoder import (
    GENERATED_FILE,
    PREFILL,
    CacheEntry,
    Decoder,
    GenerationRequest,
    Slot,
)
from autopipe.backends.torch.runtime.modes.mode import Mode
from autopipe.backends.torch.runtime.random_numbers.philox import (
    Purpose,
    as_unsigned,
    draw_run,
    key_of,
)
from autopipe.backends.torch.runtime.state.loading import load_second
from autopipe.backends.torch.runtime.step.rank_context import RankContext
from autopipe.ir.errors import ConfigurationError, LaunchError
from autopipe.ir.kv_cache import MASK, POSITIONS, TOKENS
from autopipe.ir.layout import TensorSlice
from autopipe.ir.program import OutputPlace, OutputShard

# Above those of channels and of collected outputs.
_TOKENS_TAG = 1 << 21
_LOGITS_TAG = 1 << 22
_NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class _Group:
    """A micro-batch of the stage that gives the logits: rows of the batch whose tokens are chosen
    together, on the rank `sampler`.
    """

    number: int
    place: OutputPlace
    rows: range

    @property
    def shards(self) -> tuple[OutputShard, ...]:
        return needed_shards(self.place)

    @property
    def sampler(self) -> int:
        return self.shards[0].rank


class TokenExchange:
    """New tokens of the groups, from the ranks that choose them to all others, in the order of
    steps.
    """

    def __init__(self, rank: RankContext, groups: Sequence[_Group]) -> None:
        self._rank = rank
        self._groups = groups
        self._arriving = defaultdict[int, deque[tuple[dist.Work | None, torch.Tensor]]](deque)
        self._leaving: deque[list[tuple[dist.Work | None, torch.Tensor]]] = deque()

    def begin_step(self) -> None:
        """Ask for all tokens of a step. Those of the steps before the last have arrived everywhere
        soon.
        """
        for group in self._groups:
            if group.sampler != self._rank.number:
                tokens = torch.empty(len(group.rows), dtype=torch.int64)
                work = dist.irecv(tokens, group.sampler, tag=_TOKENS_TAG + group.number)
                self._arriving[group.number].append((work, tokens))
        self._leaving.append([])
        while len(self._leaving) > 2:
            self._finish(self._leaving.popleft())

    def give(self, group: _Group, tokens: list[int]) -> None:
        """Send a group's tokens of this step to all other ranks."""
        made = torch.tensor(tokens)
        self._arriving[group.number].append((None, made))
        for other in range(self._rank.transport.world_size):
            if other != self._rank.number:
                self.send(made, other, _TOKENS_TAG + group.number)

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> None:
        self._leaving[-1].append((dist.isend(tensor, rank, tag=tag), tensor))

    def take(self, group: _Group) -> list[int]:
        """A group's tokens of the first step of which they were not taken; `_NO_TOKEN` where a row
        got none.
        """
        work, tokens = self._arriving[group.number].popleft()
        if work is not None:
            with self._rank.heartbeat.waiting(group.sampler):
                work.wait()
        found: list[int] = tokens.tolist()
        return found

    def finish(self) -> None:
        for sent in self._leaving:
            self._finish(sent)

    def _finish(self, sent: list[tuple[dist.Work | None, torch.Tensor]]) -> None:
        with self._rank.heartbeat.waiting():
            for work, _ in sent:
                if work is not None:
                    work.wait()


@dataclass(frozen=True, slots=True)
class _Program:
    """A program of this rank: its stages, its step, and its decoder."""

    rank: RankContext
    step: Callable[[], None]
    decoder: Decoder


class Generation(BatchReader):
    """The sequences of a request on one rank, step by step: the reader of what its stages take,
    which goes by what they gave before.
    """

    def __init__(self, rank: RankContext, step: Callable[[], None], folder: Path) -> None:
        super().__init__(rank.manifest, rank.reader.source, rank.device)
        self._rank = rank
        self._folder = folder
        self._request = GenerationRequest.read(folder)
        loaded = [(rank, step)]
        if (second := rank.manifest.folder / PREFILL).is_dir():
            loaded.append(load_second(rank, second))
        self._programs = [_Program(*each, Decoder.of(each[0].manifest)) for each in loaded]
        for each, _ in loaded:
            each.reader = self
            each.collect = self.collect
        self._program = self._programs[0]
        """That of this step."""
        self.decoder.check(self._request)
        batch = rank.manifest.batch_size
        self._slots = [Slot(self._request, row, batch) for row in range(batch)]
        places = [
            (place, row)
            for place in self.decoder.logits.places
            for row in self._rows_of(place.stage)
        ]
        self._groups = [_Group(number, place, rows) for number, (place, rows) in enumerate(places)]
        self._steps = [-1] * len(self._groups)
        """The step that each group's slots are at."""
        self._exchange = TokenExchange(rank, self._groups)
        self._caches: dict[tuple[int, int, str], torch.Tensor] = {}
        self._generated: dict[int, list[int]] = {}
        for program in self._programs:
            self._check_blocks(program)

    @property
    def decoder(self) -> Decoder:
        return self._program.decoder

    def _rows_of(self, stage: int) -> list[range]:
        """Rows of the batch in each micro-batch that a stage runs."""
        return [
            self._rows(stage, micro_batch)
            for micro_batch in self._rank.manifest.micro_batches_of(stage)
        ]

    def _rows(self, stage: int, micro_batch: int) -> range:
        size = self._rank.manifest.batch_size // self._rank.manifest.micro_batches_at(stage)
        return range(micro_batch * size, (micro_batch + 1) * size)

    def _check_blocks(self, program: _Program) -> None:
        """Raise ConfigurationError where a stage gives a block of a cache that is not the one that
        it takes.
        """
        for stage in program.rank.stages.values():
            for data in stage.data:
                entry = program.decoder.cache.get(data.name)
                if entry is None:
                    continue
                box = self._present_box(entry, stage.number)
                if box is None or _without(entry.axis, box.slices) != _without(
                    entry.axis, tuple(slice(*each) for each in data.offsets)
                ):
                    raise ConfigurationError(
                        f"{data.name!r} and {entry.present.value.name!r} are not cut alike",
                        hint="plan with splits along heads or samples alone, and both in one stage",
                        where=f"rank {self._rank.number}, stage {stage.number}",
                    )

    def _present_box(self, entry: CacheEntry, stage: int) -> TensorSlice | None:
        """This rank's block of what a stage gives for a cache; None where it has none."""
        shards = (
            each for place in entry.present.places if place.stage == stage for each in place.shards
        )
        return next((shard.box for shard in shards if shard.rank == self._rank.number), None)

    def run(self) -> None:
        """Run steps until all sequences have ended; rank 0 writes them."""
        rank = self._rank
        began = time.perf_counter()
        first = 0.0
        while self._goes_on():
            running = self._program.rank
            self._exchange.begin_step()
            running.clock.begin_step()
            self._program.step()
            rank.transport.traffic.clear()
            for stage in running.stages.values():
                stage.end_step()
            for program in self._programs:
                program.rank.steps_done += 1
            first = first or time.perf_counter() - began
        self._begin(rank.steps_done, range(len(self._slots)))
        seconds = time.perf_counter() - began
        self._exchange.finish()
        with rank.heartbeat.waiting():
            rank.transport.finish()
        if rank.number == 0:
            found = [self._generated[sequence] for sequence in range(len(self._request.prompts))]
            report = {
                "generated": found,
                "steps": rank.steps_done,
                "seconds": seconds,
                "first_step_s": first,
            }
            (self._folder / GENERATED_FILE).write_text(json.dumps(report), encoding="utf-8")

    def _goes_on(self) -> bool:
        """True if there is a next step, whose program is chosen: on all ranks alike, and without
        the last step's tokens, for which no rank shall wait before it needs them. Where one of
        those ends the last sequence, one step too many is run.
        """
        if self._rank.steps_done > 0:
            self._begin(self._rank.steps_done - 1, range(len(self._slots)))
        most = max(slot.waiting for slot in self._slots)
        self._program = self._programs[-1 if most > self._programs[0].decoder.step_length else 0]
        return most > 0

    def _begin(self, step: int, rows: range) -> None:
        """Bring the rows' slots to a step, the one that they are at or the next: wait for the last
        one's tokens.
        """
        for group in self._groups:
            if (
                self._steps[group.number] >= step
                or group.rows.stop <= rows.start
                or rows.stop <= group.rows.start
            ):
                continue
            tokens = self._exchange.take(group) if step else [_NO_TOKEN] * len(group.rows)
            self._steps[group.number] = step
            for row, token in zip(group.rows, tokens, strict=True):
                given = None if token == _NO_TOKEN else token
                ended = self._slots[row].begin_step(given, self.decoder.step_length)
                if ended is not None:
                    self._generated[ended[0]] = ended[1]

    def read(self, step: int, request: BlockRequest) -> torch.Tensor:
        """An argument of a stage: a block of the cache, or of what follows from the tokens."""
        if request.name in self.decoder.cache:
            cached = self._caches.get((request.stage, request.micro_batch, request.name))
            if cached is not None:
                return cached
            shape = [stop - start for start, stop in request.box]
            return torch.zeros(shape, dtype=self._dtype(request), device=self._rank.device)
        rows = self._rows(request.stage, request.micro_batch)
        self._begin(step, rows)
        first, last = request.box[0]
        slots = [self._slots[row] for row in rows[first:last]]
        made = {TOKENS: self._tokens, MASK: self._mask, POSITIONS: self._positions}[request.name](
            slots
        )
        block = torch.from_numpy(made[:, slice(*request.box[1])])
        return block.to(self._rank.device, self._dtype(request), non_blocking=True)

    def _tokens(self, slots: Sequence[Slot]) -> np.ndarray:
        made = np.zeros((len(slots), self.decoder.step_length), np.int64)
        for row, slot in zip(made, slots, strict=True):
            fed = slot.tokens[self._first(slot) : slot.cached + slot.feed]
            row[: len(fed)] = fed
        return made

    def _first(self, slot: Slot) -> int:
        """The place of the first token that a step feeds of a slot: behind those in the cache.
        Where a step would be longer than what is left of one that is written in place, some that it
        has are fed again.
        """
        if not self.decoder.in_place:
            return slot.cached
        return min(slot.cached, self.decoder.cache_length - self.decoder.step_length)

    def _mask(self, slots: Sequence[Slot]) -> np.ndarray:
        """Of the cache's places and the step's, those that count; at least one, of whose scores a
        softmax can be.
        """
        length = self.decoder.cache_length
        step = self.decoder.step_length
        if self.decoder.in_place:
            filled = [self._first(slot) + step for slot in slots]
            return (np.arange(length) < np.array(filled)[:, None]).astype(np.int64)
        made = np.zeros((len(slots), length + step), np.int64)
        for row, slot in zip(made, slots, strict=True):
            row[length - slot.cached : length + max(1, slot.feed)] = 1
        return made

    def _positions(self, slots: Sequence[Slot]) -> np.ndarray:
        """Of what is fed; what stands behind it has the last one's, which the model's tables
        have.
        """
        along = np.arange(self.decoder.step_length)
        ends = [(self._first(slot), slot.cached + slot.feed) for slot in slots]
        return np.stack([np.minimum(first + along, max(first, end - 1)) for first, end in ends])

    def collect(self, stage: int, micro_batch: int, results: tuple[torch.Tensor, ...]) -> None:
        """Take a stage's results of a micro-batch, counted over all steps: caches, and logits to
        choose tokens by.
        """
        step, number = divmod(micro_batch, self._rank.manifest.micro_batches_at(stage))
        rows = self._rows(stage, number)
        self._begin(step, rows)
        for name, entry in self.decoder.cache.items():
            if (box := self._present_box(entry, stage)) is not None:
                place = next(each for each in entry.present.places if each.stage == stage)
                self._caches[stage, number, name] = self._kept(
                    entry, box, rows, results[place.position]
                )
        for group in self._groups:
            if group.place.stage == stage and group.rows == rows:
                self._choose(group, results[group.place.position])

    def _kept(
        self, entry: CacheEntry, box: TensorSlice, rows: range, present: torch.Tensor
    ) -> torch.Tensor:
        """A block of the cache for the next step: of each row the places that end with the last
        token that counts.
        """
        if self.decoder.in_place:
            return present
        axis = entry.axis
        batch = entry.present.batch_axis
        length = self.decoder.cache_length
        assert batch is not None
        feeds = [self._slots[row].feed for row in rows[box.starts[batch] : box.stops[batch]]]
        if len(set(feeds)) == 1:
            return present.narrow(axis, feeds[0], length)
        parts = [
            present.narrow(batch, row, 1).narrow(axis, feed, length)
            for row, feed in enumerate(feeds)
        ]
        return torch.cat(parts, batch)

    def _choose(self, group: _Group, block: torch.Tensor) -> None:
        """Send this rank's block of the logits to the rank that chooses; or choose, and send the
        tokens to all.
        """
        own = self._rank.number
        boxes = {shard.rank: shard.box for shard in group.shards}
        if own not in boxes:
            return
        part = self._last_rows(group, boxes[own], block)
        if own != group.sampler:
            self._exchange.send(part, group.sampler, _LOGITS_TAG + group.number)
            return
        logits = torch.zeros((len(group.rows), self.decoder.logits.value.shape[2]))
        for rank, box in boxes.items():
            if rank != own:
                part = torch.empty((box.shape[0], box.shape[2]))
                with self._rank.heartbeat.waiting(rank):
                    dist.recv(part, rank, tag=_LOGITS_TAG + group.number)
            logits[box.slices[0], box.slices[2]] += (
                part if group.place.combine == "concat" else part / group.place.copies
            )
        tokens = [_NO_TOKEN] * len(group.rows)
        chosen = [index for index, row in enumerate(group.rows) if self._slots[row].samples]
        if chosen:
            if not logits[chosen].isfinite().all():
                raise LaunchError(
                    "logits are not finite numbers",
                    hint="look at the model's weights and precision",
                )
            slots = [self._slots[group.rows[index]] for index in chosen]
            draws = [(slot.sequence, len(slot.new)) for slot in slots]
            for index, token in zip(
                chosen, choose_tokens(logits[chosen], self._request, draws), strict=True
            ):
                tokens[index] = token
        self._exchange.give(group, tokens)

    def _last_rows(self, group: _Group, box: TensorSlice, block: torch.Tensor) -> torch.Tensor:
        """Of a block of the logits, for each of its rows those of the last token fed, [rows,
        vocabulary], in host memory; zeros where that token is in another block.
        """
        slots = [self._slots[row] for row in group.rows[box.slices[0]]]
        last = torch.tensor(
            [slot.cached + slot.feed - 1 - self._first(slot) - box.starts[1] for slot in slots]
        )
        inside = (last >= 0) & (last < block.shape[1])
        places = last.clamp(0, block.shape[1] - 1).to(block.device)
        rows = block[torch.arange(len(slots), device=block.device), places].float().cpu()
        return torch.where(inside[:, None], rows, 0.0)


def _without(axis: int, slices: Sequence[slice]) -> list[slice]:
    return [each for index, each in enumerate(slices) if index != axis]


class Generate(Mode):
    """Generates tokens for the request in a folder, in place of steps on data."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def run(self, rank: RankContext, step: Callable[[], None]) -> bool:
        Generation(rank, step, self._folder).run()
        return True


def choose_tokens(
    logits: torch.Tensor, request: GenerationRequest, draws: Sequence[tuple[int, int]]
) -> list[int]:
    """A token for each row of logits [rows, vocabulary] in host memory, as the request says.
    `draws` names each row's draw by its sequence and the number of its new token: a draw is the
    same whoever makes it, beside whatever others.
    """
    if request.temperature == 0.0:
        return [int(token) for token in logits.argmax(-1)]
    scaled, order = (logits.double() / request.temperature).sort(
        dim=-1, descending=True, stable=True
    )
    if request.top_k is not None:
        scaled[:, request.top_k :] = -torch.inf
    shares = scaled.softmax(-1)
    if request.top_p is not None:
        shares[shares.cumsum(-1) - shares >= request.top_p] = (
            0.0  # The first that reaches it counts too.
        )
    sums = shares.cumsum(-1)
    drawn = torch.stack([_uniform(request.seed, sequence, number) for sequence, number in draws])
    below = drawn[:, None] * sums[:, -1:]
    places = (sums <= below).sum(-1, keepdim=True)
    places = places.clamp(
        max=(shares > 0).sum(-1, keepdim=True) - 1
    )  # Sums are rounded, at their end too.
    return [int(token) for token in order.gather(-1, places)[:, 0]]


def _uniform(seed: int, sequence: int, number: int) -> torch.Tensor:
    """Return the number in [0, 1) that chooses a sequence's token `number`, float64."""
    words = as_unsigned(draw_run(key_of(seed, Purpose.TOKEN, sequence), 2 * number, 2))
    return ((words[0] << 21) + (words[1] >> 11)).double() * 2.0**-53
