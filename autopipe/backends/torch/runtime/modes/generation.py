"""Token generation with a decoder over the ranks of a program (`autopipe generate`).

A micro-batch is a group of sequences: while one stage processes a group, the next stage processes
the previous group. Keys and values of a layer stay on the ranks that computed them, each rank with
its shard. Of each group, one rank (the sampler) gathers the logits, chooses the new tokens and
sends them to all other ranks. From the tokens, each rank computes the other inputs of a step: mask
and positions.

Programs have static shapes. One program processes one token per sequence and step; a second program
(`PREFILL_FOLDER`), if there is one, processes many tokens of a prompt per step. Each row of the
batch is a sequence. The tokens of a sequence occupy the end of the cache, and the mask excludes the
positions before them. The tokens that a step processes come first in the step's positions; filler
tokens follow, whose results are discarded. So sequences of different lengths, ended sequences, and
prompts that are processed in several steps can be rows of one batch.

In a cache that is written in place, the tokens occupy the front. A step also writes its filler
tokens there, behind its last token; the next step overwrites them.
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
from autopipe.backends.torch.runtime.data.outputs import shards_to_gather
from autopipe.backends.torch.runtime.modes.decoder import (
    GENERATED_FILE,
    PREFILL_FOLDER,
    CacheEntry,
    Decoder,
    GenerationRequest,
    SequenceSlot,
)
from autopipe.backends.torch.runtime.random_numbers.philox import (
    Purpose,
    as_unsigned,
    draw_sequence,
    key_of,
)
from autopipe.backends.torch.runtime.state.loading import load_second_program
from autopipe.backends.torch.runtime.step.stage import Mode, RankContext
from autopipe.ir.errors import ConfigurationError, LaunchError
from autopipe.ir.kv_cache import MASK, POSITIONS, TOKENS
from autopipe.ir.layout import TensorSlice
from autopipe.ir.program import OutputShard, OutputStage

# First tags of the gloo messages with tokens and with logits. They are larger than the tags of
# channels and of collected outputs, so that all these tags differ.
_TOKENS_TAG = 1 << 21
_LOGITS_TAG = 1 << 22
_NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class _SamplingGroup:
    """The sequences of one micro-batch of a stage that computes logits. `rows` are their rows of
    the batch, `place` is the stage. One rank, the sampler, chooses their tokens.
    """

    number: int
    place: OutputStage
    rows: range

    @property
    def shards(self) -> tuple[OutputShard, ...]:
        """The shards of the logits that the sampler gathers."""
        return shards_to_gather(self.place)

    @property
    def sampler(self) -> int:
        """The rank that chooses the tokens of the group."""
        return self.shards[0].rank


class TokenExchange:
    """Distributes the new tokens of each group, the sequences of one micro-batch, to all ranks. One
    rank per group, its sampler, has chosen them.
    """

    def __init__(self, rank: RankContext, groups: Sequence[_SamplingGroup]) -> None:
        self._rank = rank
        self._groups = groups
        self._arriving = defaultdict[int, deque[tuple[dist.Work | None, torch.Tensor]]](deque)
        self._leaving: deque[list[tuple[dist.Work | None, torch.Tensor]]] = deque()

    def begin_step(self) -> None:
        """Post the receives for all tokens of the next step from other samplers. Wait for sends
        that started before the previous step, so that few sends are pending.
        """
        for group in self._groups:
            if group.sampler != self._rank.number:
                tokens = torch.empty(len(group.rows), dtype=torch.int64)
                work = dist.irecv(tokens, group.sampler, tag=_TOKENS_TAG + group.number)
                self._arriving[group.number].append((work, tokens))
        self._leaving.append([])
        while len(self._leaving) > 2:
            self._wait_for_sends(self._leaving.popleft())

    def send_tokens(self, group: _SamplingGroup, tokens: list[int]) -> None:
        """Start to send the tokens of a group in the current step to all other ranks. Called on the
        group's sampler only.
        """
        made = torch.tensor(tokens)
        self._arriving[group.number].append((None, made))
        for other in range(self._rank.transport.world_size):
            if other != self._rank.number:
                self.send(made, other, _TOKENS_TAG + group.number)

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> None:
        """Start to send a tensor to rank `rank`, and keep the tensor until it is sent."""
        self._leaving[-1].append((dist.isend(tensor, rank, tag=tag), tensor))

    def receive_tokens(self, group: _SamplingGroup) -> list[int]:
        """Wait for the tokens of a group and return them, one per row; `_NO_TOKEN` for a row
        without a new token. The n-th call for a group returns the tokens of the n-th step.
        """
        work, tokens = self._arriving[group.number].popleft()
        if work is not None:
            with self._rank.heartbeat.record_wait(group.sampler):
                work.wait()
        found: list[int] = tokens.tolist()
        return found

    def finish(self) -> None:
        """Wait until all tensors have been sent."""
        for sent in self._leaving:
            self._wait_for_sends(sent)

    def _wait_for_sends(self, sent: list[tuple[dist.Work | None, torch.Tensor]]) -> None:
        """Wait until the tensors in `sent` have been sent."""
        with self._rank.heartbeat.record_wait():
            for work, _ in sent:
                if work is not None:
                    work.wait()


@dataclass(frozen=True, slots=True)
class _DecoderProgram:
    """A program of which this process runs a rank: the rank with its stages, the generated function
    `step`, and the roles of inputs and outputs.
    """

    rank: RankContext
    step: Callable[[], None]
    decoder: Decoder


class Generation(BatchReader):
    """One rank's part in a generation: the sequences of the request and the rank's shard of the
    cache.

    It replaces the reader of input data, because the inputs of a step depend on the results of
    earlier steps.
    """

    def __init__(self, rank: RankContext, step: Callable[[], None], folder: Path) -> None:
        """Prepare the generation for the request in `folder`. `step` is the generated function of
        the program that processes one token per step. Raise ConfigurationError if the programs
        cannot process the request.
        """
        super().__init__(rank.manifest, rank.reader.source, rank.device)
        self._rank = rank
        self._folder = folder
        self._request = GenerationRequest.read(folder)
        loaded = [(rank, step)]
        if (second := rank.manifest.folder / PREFILL_FOLDER).is_dir():
            loaded.append(load_second_program(rank, second))
        self._programs = [
            _DecoderProgram(*each, Decoder.from_manifest(each[0].manifest)) for each in loaded
        ]
        for each, _ in loaded:
            each.reader = self
            each.collect = self.collect
        self._program = self._programs[0]
        """The program that runs the current step."""
        self.decoder.check(self._request)
        batch = rank.manifest.batch_size
        self._slots = [SequenceSlot(self._request, row, batch) for row in range(batch)]
        places = [
            (place, row)
            for place in self.decoder.logits.places
            for row in self._rows_by_micro_batch(place.stage)
        ]
        self._groups = [
            _SamplingGroup(number, place, rows) for number, (place, rows) in enumerate(places)
        ]
        self._steps = [-1] * len(self._groups)
        """For each group of rows (micro-batch), the index of the last step for which the states of
        its rows have been prepared; -1 for none.
        """
        self._exchange = TokenExchange(rank, self._groups)
        self._caches: dict[tuple[int, int, str], torch.Tensor] = {}
        self._generated: dict[int, list[int]] = {}
        for program in self._programs:
            self._check_cache_shards(program)

    @property
    def decoder(self) -> Decoder:
        """The inputs and outputs of the program that runs the current step."""
        return self._program.decoder

    def _rows_by_micro_batch(self, stage: int) -> list[range]:
        """Return the rows of the batch in each micro-batch that a stage runs."""
        return [
            self._rows_of_micro_batch(stage, micro_batch)
            for micro_batch in self._rank.manifest.micro_batches_of(stage)
        ]

    def _rows_of_micro_batch(self, stage: int, micro_batch: int) -> range:
        """Return the rows of the batch in one micro-batch of a stage."""
        size = self._rank.manifest.batch_size // self._rank.manifest.micro_batch_count(stage)
        return range(micro_batch * size, (micro_batch + 1) * size)

    def _check_cache_shards(self, program: _DecoderProgram) -> None:
        """Raise ConfigurationError if a stage of this rank reads a shard of the cache but computes
        another shard of the updated cache, since the cache would then have to move between ranks.
        """
        for stage in program.rank.stages.values():
            for data in stage.data:
                entry = program.decoder.cache.get(data.name)
                if entry is None:
                    continue
                box = self._updated_cache_slice(entry, stage.number)
                if box is None or _remove_axis(entry.axis, box.slices) != _remove_axis(
                    entry.axis, tuple(slice(*each) for each in data.offsets)
                ):
                    raise ConfigurationError(
                        f"the cache values {data.name!r} and {entry.present.value.name!r} are "
                        "sharded differently",
                        hint="plan with splits along heads or samples only, and with both "
                        "values in one stage",
                        where=f"rank {self._rank.number}, stage {stage.number}",
                    )

    def _updated_cache_slice(self, entry: CacheEntry, stage: int) -> TensorSlice | None:
        """Return the slice of the updated cache that this rank has after the forward of a stage;
        None if the stage does not compute it on this rank.
        """
        shards = (
            each for place in entry.present.places if place.stage == stage for each in place.shards
        )
        return next((shard.box for shard in shards if shard.rank == self._rank.number), None)

    def run(self) -> None:
        """Run steps until all sequences have ended. Rank 0 writes the generated tokens to
        `GENERATED_FILE`.
        """
        rank = self._rank
        began = time.perf_counter()
        first = 0.0
        while self._select_next_program():
            running = self._program.rank
            self._exchange.begin_step()
            running.clock.begin_step()
            self._program.step()
            running.clear_step()
            for program in self._programs:
                program.rank.steps_done += 1
            first = first or time.perf_counter() - began
        self._prepare_slots(rank.steps_done, range(len(self._slots)))
        seconds = time.perf_counter() - began
        self._exchange.finish()
        with rank.heartbeat.record_wait():
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

    def _select_next_program(self) -> bool:
        """Decide whether there is another step, and select its program. Return False if there is
        none. All ranks decide equally.

        The decision does not use the tokens of the last step, so that no rank waits for them before
        it needs them. So one unnecessary step runs if one of these tokens ends the last sequence.
        """
        if self._rank.steps_done > 0:
            self._prepare_slots(self._rank.steps_done - 1, range(len(self._slots)))
        most = max(slot.known_tokens_left for slot in self._slots)
        self._program = self._programs[-1 if most > self._programs[0].decoder.step_length else 0]
        return most > 0

    def _prepare_slots(self, step: int, rows: range) -> None:
        """Prepare the slots, the states of the rows of the batch, for step `step`: all slots of
        each group (micro-batch) that contains any of `rows`. If a group is not yet at this step,
        wait for its tokens of the previous step and advance its slots.
        """
        for group in self._groups:
            if (
                self._steps[group.number] >= step
                or group.rows.stop <= rows.start
                or rows.stop <= group.rows.start
            ):
                continue
            tokens = self._exchange.receive_tokens(group) if step else [_NO_TOKEN] * len(group.rows)
            self._steps[group.number] = step
            for row, token in zip(group.rows, tokens, strict=True):
                given = None if token == _NO_TOKEN else token
                ended = self._slots[row].begin_step(given, self.decoder.step_length)
                if ended is not None:
                    self._generated[ended[0]] = ended[1]

    def read(self, step: int, request: BlockRequest) -> torch.Tensor:
        """Return an input of a stage for a micro-batch, as `request` specifies: this rank's shard
        of the cache, the tokens, the mask, or the positions.
        """
        if request.name in self.decoder.cache:
            cached = self._caches.get((request.stage, request.micro_batch, request.name))
            if cached is not None:
                return cached
            shape = [stop - start for start, stop in request.box]
            return torch.zeros(shape, dtype=self._dtype_of(request), device=self._rank.device)
        rows = self._rows_of_micro_batch(request.stage, request.micro_batch)
        self._prepare_slots(step, rows)
        first, last = request.box[0]
        slots = [self._slots[row] for row in rows[first:last]]
        made = {TOKENS: self._token_ids, MASK: self._mask, POSITIONS: self._positions}[
            request.name
        ](slots)
        block = torch.from_numpy(made[:, slice(*request.box[1])])
        return block.to(self._rank.device, self._dtype_of(request), non_blocking=True)

    def _token_ids(self, slots: Sequence[SequenceSlot]) -> np.ndarray:
        """Return the token ids that the current step processes, int64 [slots, step length], for
        some rows of the batch. A slot is the state of a row. Unused positions have the id 0.
        """
        made = np.zeros((len(slots), self.decoder.step_length), np.int64)
        for row, slot in zip(made, slots, strict=True):
            fed = slot.tokens[self._first_position(slot) : slot.cached + slot.feed]
            row[: len(fed)] = fed
        return made

    def _first_position(self, slot: SequenceSlot) -> int:
        """Return the position in the sequence of the first token that the current step processes.
        This is the first token that is not cached. Only if a cache that is written in place has
        fewer positions left than a step has tokens, the step starts earlier and processes some
        cached tokens again.
        """
        if not self.decoder.in_place:
            return slot.cached
        return min(slot.cached, self.decoder.cache_length - self.decoder.step_length)

    def _mask(self, slots: Sequence[SequenceSlot]) -> np.ndarray:
        """Return the attention mask for some rows of the batch, int64 [slots, mask length], where a
        slot is the state of a row. It is 1 for positions of the cache and of the step that are in
        use, otherwise 0. Each row has at least one 1, because a softmax over no position is NaN.
        """
        length = self.decoder.cache_length
        step = self.decoder.step_length
        if self.decoder.in_place:
            filled = [self._first_position(slot) + step for slot in slots]
            return (np.arange(length) < np.array(filled)[:, None]).astype(np.int64)
        made = np.zeros((len(slots), length + step), np.int64)
        for row, slot in zip(made, slots, strict=True):
            row[length - slot.cached : length + max(1, slot.feed)] = 1
        return made

    def _positions(self, slots: Sequence[SequenceSlot]) -> np.ndarray:
        """Return the position ids of the tokens that the current step processes, int64 [slots, step
        length], for some rows of the batch. A slot is the state of a row. Filler tokens get the
        position of the last token, because larger positions may be outside of the model's tables.
        """
        along = np.arange(self.decoder.step_length)
        ends = [(self._first_position(slot), slot.cached + slot.feed) for slot in slots]
        return np.stack([np.minimum(first + along, max(first, end - 1)) for first, end in ends])

    def collect(self, stage: int, micro_batch: int, results: tuple[torch.Tensor, ...]) -> None:
        """Take the results of a stage's forward: store the updated caches and, if the results
        include logits, choose new tokens. `micro_batch` is numbered over all steps.
        """
        step, number = divmod(micro_batch, self._rank.manifest.micro_batch_count(stage))
        rows = self._rows_of_micro_batch(stage, number)
        self._prepare_slots(step, rows)
        for name, entry in self.decoder.cache.items():
            if (box := self._updated_cache_slice(entry, stage)) is not None:
                place = next(each for each in entry.present.places if each.stage == stage)
                self._caches[stage, number, name] = self._next_cache(
                    entry, box, rows, results[place.position]
                )
        for group in self._groups:
            if group.place.stage == stage and group.rows == rows:
                self._choose_and_send_tokens(group, results[group.place.position])

    def _next_cache(
        self, entry: CacheEntry, box: TensorSlice, rows: range, present: torch.Tensor
    ) -> torch.Tensor:
        """Return this rank's shard of the cache for the next step, from the updated cache
        `present`. In each row it contains the `cache_length` positions that end with the last
        processed token.
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

    def _choose_and_send_tokens(self, group: _SamplingGroup, block: torch.Tensor) -> None:
        """Send this rank's shard of the logits, `block`, to the group's sampler. On the sampler,
        choose the tokens and send them to all ranks. Raise LaunchError if the logits are not
        finite.
        """
        own = self._rank.number
        boxes = {shard.rank: shard.box for shard in group.shards}
        if own not in boxes:
            return
        part = self._last_token_logits(group, boxes[own], block)
        if own != group.sampler:
            self._exchange.send(part, group.sampler, _LOGITS_TAG + group.number)
            return
        logits = torch.zeros((len(group.rows), self.decoder.logits.value.shape[2]))
        for rank, box in boxes.items():
            if rank != own:
                part = torch.empty((box.shape[0], box.shape[2]))
                with self._rank.heartbeat.record_wait(rank):
                    dist.recv(part, rank, tag=_LOGITS_TAG + group.number)
            logits[box.slices[0], box.slices[2]] += (
                part if group.place.combine == "concat" else part / group.place.copies
            )
        tokens = [_NO_TOKEN] * len(group.rows)
        chosen = [index for index, row in enumerate(group.rows) if self._slots[row].generates_token]
        if chosen:
            if not logits[chosen].isfinite().all():
                raise LaunchError(
                    "logits of the model are infinite or NaN",
                    hint="check the model's weights and precision",
                )
            slots = [self._slots[group.rows[index]] for index in chosen]
            draws = [(slot.sequence, len(slot.new)) for slot in slots]
            for index, token in zip(
                chosen, choose_tokens(logits[chosen], self._request, draws), strict=True
            ):
                tokens[index] = token
        self._exchange.send_tokens(group, tokens)

    def _last_token_logits(
        self, group: _SamplingGroup, box: TensorSlice, block: torch.Tensor
    ) -> torch.Tensor:
        """Return the logits of the last processed token of each row, from a shard of the logits:
        float32 [rows, vocabulary of the shard], in host memory. They are 0 if this token is in
        another shard.
        """
        slots = [self._slots[row] for row in group.rows[box.slices[0]]]
        last = torch.tensor(
            [
                slot.cached + slot.feed - 1 - self._first_position(slot) - box.starts[1]
                for slot in slots
            ]
        )
        inside = (last >= 0) & (last < block.shape[1])
        places = last.clamp(0, block.shape[1] - 1).to(block.device)
        rows = block[torch.arange(len(slots), device=block.device), places].float().cpu()
        return torch.where(inside[:, None], rows, 0.0)


def _remove_axis(axis: int, slices: Sequence[slice]) -> list[slice]:
    """Return `slices` without the slice of dimension `axis`."""
    return [each for index, each in enumerate(slices) if index != axis]


class Generate(Mode):
    """Mode that generates tokens for the request in a folder, instead of running steps on data."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def run(self, rank: RankContext, step: Callable[[], None]) -> bool:
        Generation(rank, step, self._folder).run()
        return True


def choose_tokens(
    logits: torch.Tensor, request: GenerationRequest, draws: Sequence[tuple[int, int]]
) -> list[int]:
    """Return the next token for each row of `logits`, [rows, vocabulary] in host memory, chosen as
    the request specifies.

    `draws[i]` is (sequence, index of the new token in the sequence) of row i. Together with the
    seed of the request, it determines the random number of the row. So a token does not depend on
    the rank or on other rows.
    """
    if request.temperature == 0.0:
        return [int(token) for token in logits.argmax(-1)]
    scaled, order = (logits.double() / request.temperature).sort(
        dim=-1, descending=True, stable=True
    )
    if request.top_k is not None:
        scaled[:, request.top_k :] = -torch.inf
    probabilities = scaled.softmax(-1)
    if request.top_p is not None:
        probabilities[probabilities.cumsum(-1) - probabilities >= request.top_p] = (
            # A token is excluded if the tokens before it already reach top_p, so the token that
            # reaches top_p is included.
            0.0
        )
    sums = probabilities.cumsum(-1)
    drawn = torch.stack(
        [_uniform_number(request.seed, sequence, number) for sequence, number in draws]
    )
    below = drawn[:, None] * sums[:, -1:]
    places = (sums <= below).sum(-1, keepdim=True)
    # `places` counts the cumulative sums up to the random number. Because of rounding, it may
    # exceed the index of the last token with a positive probability, so it is limited to this
    # index.
    places = places.clamp(max=(probabilities > 0).sum(-1, keepdim=True) - 1)
    return [int(token) for token in order.gather(-1, places)[:, 0]]


def _uniform_number(seed: int, sequence: int, number: int) -> torch.Tensor:
    """Return the random number in [0, 1), float64 [], with which token `number` of a sequence is
    chosen.
    """
    words = as_unsigned(draw_sequence(key_of(seed, Purpose.TOKEN, sequence), 2 * number, 2))
    return ((words[0] << 21) + (words[1] >> 11)).double() * 2.0**-53
