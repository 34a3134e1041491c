"""A decoder program (an inference program of a language model with a key-value cache): the roles of
its inputs and outputs, a request to generate tokens, and the state of each row of the batch.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.ir.codec import AtLeast, Count, Index, OmitDefault, decode, encode
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.files import JsonRecord
from autopipe.ir.graph import DType
from autopipe.ir.kv_cache import LOGITS, MASK, POSITIONS, TOKENS, cache_pairs, is_cache_input
from autopipe.ir.program import InputRange, Output
from autopipe.ir.words import plural

REQUEST_FILE = "request.json"
"""Name of the file with the request, in the folder that `--generate` names."""
GENERATED_FILE = "generated.json"
"""Name of the file with the generated tokens, which rank 0 writes into the folder that `--generate`
names.
"""
PREFILL_FOLDER = "prefill"
"""Name of a folder in a program folder. It contains a second program of the model whose steps
process more tokens per sequence, for the prompts.
"""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Prompts as token ids, and how to continue each of them: by `max_new_tokens` tokens, or until
    one of the tokens `eos` is generated.

    With `temperature` 0 the most likely token is chosen. Otherwise a token is sampled from
    softmax(logits / temperature), restricted to the `top_k` most likely tokens, and to the smallest
    set of most likely tokens whose probabilities sum to at least `top_p`. None for no restriction.
    """

    prompts: tuple[tuple[Index, ...], ...]
    max_new_tokens: Count
    eos: tuple[Index, ...] = ()
    temperature: Annotated[float, AtLeast(0)] = 0.0
    top_k: Annotated[Count | None, OmitDefault()] = None
    top_p: Annotated[float | None, OmitDefault()] = None
    seed: Index = 0

    def write(self, folder: Path) -> None:
        """Write the request to its file in `folder`."""
        (folder / REQUEST_FILE).write_text(json.dumps(encode(self)), encoding="utf-8")

    @staticmethod
    def read(folder: Path) -> GenerationRequest:
        """Return the request in `folder`, which `write` has written."""
        path = folder / REQUEST_FILE
        record = JsonRecord(json.loads(path.read_text(encoding="utf-8")), str(path))
        found: GenerationRequest = decode(record, GenerationRequest)
        return found


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """Keys or values of one layer. The output `present` of a step becomes the input `past` of the
    next step. Dimension `axis` of both has one position per token.
    """

    past: InputRange
    present: Output
    axis: int

    @property
    def grows(self) -> bool:
        """True if `present` is `past` followed by the tokens of the step. False if the step writes
        its tokens into positions of the cache, so that `past` and `present` have the same shape.
        """
        return self.past.value.shape[self.axis] < self.present.value.shape[self.axis]


@dataclass(frozen=True, slots=True)
class Decoder:
    """The inputs and outputs of a decoder program. A step processes up to `step_length` tokens of
    each sequence.

    If `in_place` is False, the cache has `cache_length` positions for earlier tokens, and the
    tokens of a step follow behind them. The mask marks the positions of the cache and of the step
    that are in use.

    If `in_place` is True, the step writes its tokens into the `cache_length` positions of the
    cache. The mask marks the positions that are in use, which are the first.
    """

    tokens: InputRange
    mask: InputRange
    positions: InputRange | None
    cache: dict[str, CacheEntry]
    """Cache entries by the name of their input `past`."""
    logits: Output
    cache_length: int
    step_length: int
    in_place: bool = False

    @staticmethod
    def from_manifest(manifest: Manifest) -> Decoder:
        """Return the inputs and outputs of the decoder program with this manifest. Raise
        ConfigurationError if it is not an inference program, or if the model has no key-value cache
        or its inputs and outputs do not have the required names and shapes.
        """
        if manifest.train:
            raise ConfigurationError(
                "generate requires an inference program, but this program is for training",
                hint="plan with --mode infer",
            )
        inputs = {entry.value.name: entry for entry in manifest.inputs}
        outputs = {output.value.name: output for output in manifest.outputs}
        pairs = cache_pairs(inputs, outputs)
        if not pairs:
            raise ConfigurationError(
                (
                    "the model lacks a key-value cache: inputs past_key_values.N.key with "
                    "outputs present.N.key"
                ),
                hint=(
                    "export the decoder with its cache, such as with optimum-cli --task "
                    "text-generation-with-past"
                ),
            )
        for name, hint in (
            (TOKENS, ""),
            (MASK, "export the decoder with an attention mask: sequences have different lengths"),
        ):
            if (
                name not in inputs
                or len(inputs[name].value.shape) != 2
                or inputs[name].batch_axis != 0
            ):
                raise ConfigurationError(
                    f"the model lacks an input {name!r} of shape [batch, tokens]", hint=hint
                )
        for name in inputs:
            if name not in pairs and name not in (TOKENS, MASK, POSITIONS):
                missing = ": the model has no matching output" if is_cache_input(name) else ""
                raise ConfigurationError(f"input {name!r} is not supported for generation{missing}")
        length = inputs[TOKENS].value.shape[1]
        cache = {
            past: _make_cache_entry(inputs[past], outputs[present], length)
            for past, present in pairs.items()
        }
        lengths = {entry.past.value.shape[entry.axis] for entry in cache.values()}
        in_place = not any(entry.grows for entry in cache.values())
        alike = len(lengths) == 1 and len({entry.grows for entry in cache.values()}) == 1
        if not alike or inputs[MASK].value.shape[1] != max(lengths) + (0 if in_place else length):
            raise ConfigurationError(
                f"the cache has {', '.join(map(str, sorted(lengths)))} positions, a step has "
                f"{length} {plural(length, 'token')}, and the mask has the "
                f"length {inputs[MASK].value.shape[1]}, which do not match",
                hint="set --dim so that the mask is as long as the sum of cache and step, or as "
                "long as a cache that is written in place",
            )
        logits = _find_logits(
            [output for name, output in outputs.items() if name not in pairs.values()], length
        )
        positions = inputs.get(POSITIONS)
        return Decoder(
            inputs[TOKENS], inputs[MASK], positions, cache, logits, max(lengths), length, in_place
        )

    def check(self, request: GenerationRequest) -> None:
        """Raise ConfigurationError if a prompt of the request is empty or contains a token outside
        of the vocabulary, or if a prompt and its new tokens do not fit into the cache.
        """
        below = _indexed_table_rows(self.tokens) or self.logits.value.shape[2]
        places = self.cache_length + (0 if self.in_place else 1)
        if self.positions is not None and (rows := _indexed_table_rows(self.positions)):
            places = min(places, rows)
        for number, prompt in enumerate(request.prompts):
            if not prompt:
                raise ConfigurationError(
                    f"prompt {number} is empty",
                    hint="begin the prompt with the model's first token",
                )
            if (worst := max(prompt)) >= below:
                raise ConfigurationError(
                    f"prompt {number} contains token {worst}, but the vocabulary of the model "
                    f"has {below} {plural(below, 'token')}"
                )
            needed = len(prompt) + request.max_new_tokens - 1
            if needed > places:
                raise ConfigurationError(
                    f"prompt {number} of {len(prompt)} {plural(len(prompt), 'token')} and "
                    f"{request.max_new_tokens} new {plural(request.max_new_tokens, 'token')} "
                    f"require a cache of {needed} {plural(needed, 'position')}, but the program "
                    f"has {places}",
                    hint=self._cache_plan_hint(needed),
                )

    def _cache_plan_hint(self, needed: int) -> str:
        """Return the hint for the user which flags plan a cache for sequences of `needed`
        tokens.
        """
        if self.in_place:
            dims = f"--dim past_sequence_length={needed} --dim total_sequence_length={needed}"
            return f"plan a cache of {needed} {plural(needed, 'position')} with {dims}"
        return (
            f"plan a cache of {needed - 1} {plural(needed - 1, 'position')} "
            f"with --dim past_sequence_length={needed - 1}"
        )


def _indexed_table_rows(entry: InputRange) -> int | None:
    """Return the number of rows of the table that an input indexes, the minimum if there are
    several tables; None if the input is not an index.
    """
    return min((bounds.below for bounds in entry.allowed), default=None)


def _make_cache_entry(past: InputRange, present: Output, length: int) -> CacheEntry:
    """Return the cache entry of an input and an output. `length` is the number of tokens of a step.
    Raise ConfigurationError if the shapes have no dimension that counts tokens.
    """
    before = past.value.shape
    behind = present.value.shape
    where = f"{past.value.name!r} {list(before)}, {present.value.name!r} {list(behind)}"
    # The sizes of the batch axis are not compared, because `present` may come from a stage with
    # another micro-batch size.
    pairs = enumerate(zip(before, behind, strict=False))
    axes = [axis for axis, pair in pairs if axis != past.batch_axis and pair[0] != pair[1]]
    if len(before) == len(behind) == 4 and not axes:
        # All sizes are equal if the model writes the cache in place, because the cache does not
        # grow. Its shape is [batch, heads, tokens, features], so axis 2 counts tokens.
        axes = [2]
    grows = (
        len(before) == len(behind)
        and len(axes) == 1
        and behind[axes[0]] - before[axes[0]] in (0, length)
    )
    if not grows or past.batch_axis is None or past.batch_axis != present.batch_axis:
        hint = (
            f"export a cache with one axis that grows by the {length} {plural(length, 'token')} "
            "of a step, and another that is the batch axis"
        )
        raise ConfigurationError("no axis of the cache grows by the tokens of a step", hint, where)
    return CacheEntry(past, present, axes[0])


def _find_logits(outputs: list[Output], length: int) -> Output:
    """Return the output with the logits, [batch, `length`, vocabulary]: the output named so, or the
    only one. Raise ConfigurationError if there is none or it has another shape or type.
    """
    named = [output for output in outputs if output.value.name == LOGITS] or outputs
    if len(named) != 1:
        raise ConfigurationError(
            f"the model lacks an output {LOGITS!r}: none of its {len(outputs)} "
            f"{plural(len(outputs), 'output')} has this name"
        )
    logits = named[0]
    shape = logits.value.shape
    floats = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16, DType.FLOAT64)
    if (
        len(shape) != 3
        or shape[1] != length
        or logits.batch_axis != 0
        or logits.value.dtype not in floats
    ):
        form = f"{logits.value.dtype.value} {list(shape)}"
        raise ConfigurationError(
            f"output {logits.value.name!r} is {form}, expected logits of shape [batch, tokens, "
            "vocabulary]"
        )
    return logits


class SequenceSlot:
    """One row of the batch. It has a queue of sequences, which it generates one after the other,
    and the state of its current sequence. Ranks that pass equal tokens to `begin_step` have equal
    states.
    """

    def __init__(self, request: GenerationRequest, number: int, slots: int) -> None:
        """Queue the prompts `number`, `number` + `slots`, ... of the request; there are `slots`
        rows.
        """
        self._request = request
        self._queue = deque(range(number, len(request.prompts), slots))
        self.sequence = -1
        self.new: list[int] = []
        """Tokens that were generated for the current sequence."""
        self.tokens: list[int] = []
        """The prompt of the current sequence, followed by its generated tokens."""
        self.cached = 0
        """Number of tokens of the sequence that are in the cache before the current step."""
        self.feed = 0
        """Number of tokens of the sequence that the current step processes."""

    @property
    def generates_token(self) -> bool:
        """True if the current step generates a token, which it does if it processes the last token
        of the sequence.
        """
        return self.feed > 0 and self.cached + self.feed == len(self.tokens)

    @property
    def known_tokens_left(self) -> int:
        """Number of tokens that the next step could process, counted before the current step has
        generated its token. This number is provisional, because the token may end the sequence. 0
        if there is nothing left to process.
        """
        if rest := len(self.tokens) - self.cached - self.feed:
            return rest
        if self.generates_token and len(self.new) + 1 < self._request.max_new_tokens:
            return 1
        return len(self._request.prompts[self._queue[0]]) if self._queue else 0

    def begin_step(self, token: int | None, most: int) -> tuple[int, list[int]] | None:
        """Advance to the next step, which processes up to `most` tokens. `token` is the token that
        the previous step generated, None if it generated none. If `token` ends a sequence, return
        (sequence, its generated tokens), otherwise None.
        """
        self.cached += self.feed
        ended = None
        if token is not None:
            self.new.append(token)
            self.tokens.append(token)
            if token in self._request.eos or len(self.new) == self._request.max_new_tokens:
                ended = self.sequence, self.new
                self.sequence = -1
                self.new = []
                self.tokens = []
                self.cached = 0
        if self.sequence < 0 and self._queue:
            self.sequence = self._queue.popleft()
            self.tokens = list(self._request.prompts[self.sequence])
        self.feed = min(most, len(self.tokens) - self.cached)
        return ended
