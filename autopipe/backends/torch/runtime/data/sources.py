"""The sources of samples: random values, stored arrays, or a Python function. Each rank requests
only the samples and slices that it needs.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from autopipe.backends.torch.runtime.data.arrow_table import ArrowTable, table_files
from autopipe.backends.torch.runtime.data.input_checks import (
    check_element_type,
    check_rows,
    convert_rows,
    count_samples,
    numpy_dtype,
    rows_per_sample,
)
from autopipe.backends.torch.runtime.data.sample_order import (
    START_OF_RUN,
    RunProgress,
    SampleNumbers,
    SampleOrder,
)
from autopipe.backends.torch.runtime.data.sample_source import BlockRanges, SampleSource
from autopipe.backends.torch.runtime.data.stored_arrays import (
    Archive,
    Array,
    ArrayFiles,
    StoredArrays,
    TokenFile,
)
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.files import lfs_error
from autopipe.ir.program import InputRange
from autopipe.ir.training import DataSettings, is_data_function
from autopipe.ir.words import plural

_PIECE_BYTES = 1 << 24  # Bytes of an array that are checked at a time.
_MAX_CHECKED_BYTES = 1 << 29  # Maximum bytes that are checked per array before ranks start.


def open_source(
    manifest: Manifest,
    data: str | None,
    seed: int,
    begin: RunProgress = START_OF_RUN,
    settings: DataSettings | None = None,
) -> SampleSource:
    """Return the source that `data` names (see `DataSettings.path`), for a run that starts or
    resumes at `begin`; a source of random values if `data` is None. `seed` determines random values
    and shuffling. Raise ConfigurationError if the data cannot be read or do not fit the model.
    """
    settings = settings or DataSettings()
    if data is None:
        # `random_batches` is imported only when it is needed, because it imports torch, which is
        # slow to load.
        from autopipe.backends.torch.runtime.data.random_batches import (
            RandomSource,
        )

        return RandomSource(manifest, seed, begin)
    if is_data_function(data):
        return FunctionSource(manifest, data, seed, begin, settings)
    return StoredSource(manifest, open_arrays(manifest, data, settings), seed, begin, settings)


def open_arrays(manifest: Manifest, data: str, settings: DataSettings) -> StoredArrays:
    """Return the arrays stored at the path `data`. Raise ConfigurationError if the path does not
    exist, is a Git LFS pointer, has an unsupported format, or cannot be read.
    """
    path = Path(data)
    for file in sorted(path.iterdir()) if path.is_dir() else (path,):
        if pointer := lfs_error(file):
            raise ConfigurationError(*pointer, data)
    if path.suffix == ".npz":
        return Archive(path)
    if path.suffix == ".bin":
        return TokenFile(path, manifest, settings.sequence_length)
    if path.suffix == ".npy" or (path.is_dir() and any(path.glob("*.npy"))):
        return ArrayFiles(path, manifest)
    if files := table_files(path):
        return ArrowTable(path, files, manifest)
    kinds = (
        "FILE.npz, FILE.npy, a folder of .npy files, FILE.bin of tokens, Parquet, Arrow, or "
        "module:function"
    )
    missing = (
        f"the data path {data!r} does not exist"
        if not path.exists()
        else f"the data path {data!r} has an unknown format"
    )
    raise ConfigurationError(missing, hint=f"set data to {kinds}")


def read_block(
    source: SampleSource, manifest: Manifest, entry: InputRange, sample: int, box: BlockRanges
) -> np.ndarray:
    """Return the slice `box` of a micro-batch of an input, as a row-major copy. `sample` is the
    number of the micro-batch's first sample.
    """
    return _assemble_block(
        lambda first, stop: source.rows(entry, sample + first, sample + stop), manifest, entry, box
    )


def read_filled_block(
    source: SampleSource,
    manifest: Manifest,
    entry: InputRange,
    step: int,
    offset: int,
    box: BlockRanges,
) -> np.ndarray:
    """Return the slice `box` of a micro-batch of an input in a step that may have less than a batch
    of samples; filler samples, which `rows_with_filler` defines, complete the batch. The
    micro-batch starts `offset` samples into the step. The result is a row-major copy.
    """
    return _assemble_block(
        lambda first, stop: rows_with_filler(
            source, manifest, entry, step, offset + first, offset + stop, offset
        ),
        manifest,
        entry,
        box,
    )


def rows_with_filler(
    source: SampleSource,
    manifest: Manifest,
    entry: InputRange,
    step: int,
    start: int,
    stop: int,
    micro_batch: int = 0,
) -> np.ndarray:
    """Return the rows of samples [start, stop) of a step's batch. The data may have fewer samples
    for the step than a batch; each missing sample is a filler sample, a copy of the step's first
    sample.

    In training, filler samples get the ignored label, if the loss defines one, so that they do not
    count. This applies to micro-batches that also contain samples from the data; `micro_batch` is
    the index in the batch of the micro-batch's first sample. A micro-batch of only filler samples
    keeps the copied labels; its loss has weight 0 (see `RankContext.filler_factor`).
    """
    sample = source.first_sample(step)
    count = source.sample_count(step)
    if entry.batch_axis is None:
        return source.rows(entry, sample, sample)
    present = max(start, min(stop, count))
    parts = [source.rows(entry, sample + start, sample + present)] if present > start else []
    if present < stop:
        filler = np.concatenate(
            [source.rows(entry, sample, sample + 1)] * (stop - present), entry.batch_axis
        )
        if manifest.train and entry.ignored is not None and micro_batch < count:
            filler = np.full_like(filler, entry.ignored)
        parts.append(filler)
    return parts[0] if len(parts) == 1 else np.concatenate(parts, entry.batch_axis)


def _assemble_block(
    rows: Callable[[int, int], np.ndarray], manifest: Manifest, entry: InputRange, box: BlockRanges
) -> np.ndarray:
    """Return the slice `box` of a micro-batch of an input, as a copy. `rows(first, stop)` returns
    the rows of samples [first, stop) of the micro-batch.
    """
    axis = entry.batch_axis
    block = [slice(*each) for each in box]
    if axis is None:
        return np.array(rows(0, 0)[tuple(block)])
    start, stop = box[axis]
    per_sample = rows_per_sample(entry, manifest)
    first = start // per_sample
    found = rows(first, -(-stop // per_sample))
    block[axis] = slice(start - first * per_sample, stop - first * per_sample)
    return found[tuple(block)].copy()


def save_samples(manifest: Manifest, target: Path) -> None:
    """Write one step of random samples to the `.npz` file `target`. A run on this file has equal
    data in each step and does not spend time on drawing random values.
    """
    source = open_source(manifest, None, 0)
    drawn = {
        entry.value.name: source.rows(entry, 0, manifest.batch_size) for entry in manifest.inputs
    }
    np.savez(target, **drawn)  # type: ignore[arg-type]


class StoredSource(SampleSource):
    """A source that reads stored arrays, one for each input, with samples along the batch axis. All
    arrays with a batch axis have an equal number of samples.

    An epoch contains each sample at most once. Training repeats epochs, up to the number in the
    settings; inference ends after one epoch.
    """

    def __init__(
        self,
        manifest: Manifest,
        arrays: StoredArrays,
        seed: int,
        begin: RunProgress,
        settings: DataSettings,
    ) -> None:
        """Open a source on `arrays`. Raise ConfigurationError if an input has no array, if the
        arrays do not fit the model, or if training has less than a batch of samples and must not
        fill it up.
        """
        super().__init__(manifest, begin)
        self._where = str(arrays.path)
        self._stored = arrays
        self._array = cache(arrays.array)
        names = [entry.value.name for entry in manifest.inputs]
        for name in names:
            if name not in arrays.names:
                have = ", ".join(arrays.names) or "no arrays"
                raise ConfigurationError(
                    f"the data lack an array for input {name!r}",
                    hint=f"the data contain {have}",
                    where=self._where,
                )
        self.samples = count_samples(
            manifest, {name: arrays.shape(name) for name in names}, self._where
        )
        """Number of stored samples; None if no input has a batch axis."""
        train = manifest.train
        batch = manifest.batch_size
        keeps_last = not train or settings.last_batch == "pad"
        self._order: SampleOrder | None = None
        if self.samples is None:
            return
        if not keeps_last and self.samples < batch:
            raise ConfigurationError(
                (
                    f"the data have {self.samples} {plural(self.samples, 'sample')}, fewer than "
                    f"a batch of {batch}"
                ),
                hint=(
                    "plan with a smaller --batch-size, use more data, or plan with --set "
                    "data.last_batch=pad"
                ),
                where=self._where,
            )
        shuffle, epochs = (
            (seed if settings.shuffle else None, settings.epochs) if train else (None, 1)
        )
        self._order = SampleOrder(self.samples, batch, keeps_last, shuffle, epochs, begin)
        self.skipped_samples = self._order.skipped_samples

    @property
    def steps_until_end(self) -> int | None:
        """Number of steps, counted from the start of the first run, after which the data end; None
        if they never end.
        """
        return None if self._order is None else self._order.steps_until_end

    def first_sample(self, step: int) -> int:
        return super().first_sample(step) if self._order is None else self._order.first_sample(step)

    def sample_count(self, step: int) -> int:
        return super().sample_count(step) if self._order is None else self._order.sample_count(step)

    def epoch(self, step: int) -> int:
        return 1 if self.samples is None else self.first_sample(step) // self.samples + 1

    def rows(self, entry: InputRange, start: int, stop: int) -> np.ndarray:
        array = self._array(entry.value.name)
        if entry.batch_axis is None or self._order is None:
            return convert_rows(np.asarray(array[...]), entry, self._where)
        found, numbers = self._rows_and_numbers(
            array, entry, self._order.stored_indices(start, stop)
        )
        return convert_rows(found, entry, self._where, numbers)

    def check(self, samples: int | None = None) -> str:
        """Check the values of the first `samples` samples, or of all samples if None, against the
        model. Raise ConfigurationError for values that the model does not accept.

        Arrays are read in pieces of about `_PIECE_BYTES` bytes. In an array that exceeds
        `_MAX_CHECKED_BYTES`, only evenly spaced pieces are checked, of about that many bytes
        together. An array is not read if its element type shows that all its values are valid.

        Return a line for the user that lists the arrays that were checked in part, "" if there are
        none.
        """
        partly = []
        for entry in self._manifest.inputs:
            name = entry.value.name
            dtype = numpy_dtype(entry)
            array = self._array(name)
            if not entry.allowed and (array.dtype == dtype or dtype.kind not in "biu"):
                check_element_type(array.dtype, entry, self._where)
                continue
            if entry.batch_axis is None or self.samples is None:
                check_rows(np.asarray(array[...]), entry, self._where)
                continue
            stop = self.samples if samples is None else min(self.samples, samples)
            size = math.prod(array.shape) * array.dtype.itemsize // self.samples
            piece = max(1, _PIECE_BYTES // max(size, 1))
            starts = range(0, stop, piece)
            if (most := max(2, _MAX_CHECKED_BYTES // _PIECE_BYTES)) < len(starts):
                partly.append(f"{name!r}: {most * piece:,} of {stop:,} {plural(stop, 'sample')}")
                starts = np.linspace(0, stop - piece, most).astype(int).tolist()
            for first in starts:
                rows, numbers = self._rows_and_numbers(
                    array, entry, range(first, min(first + piece, stop))
                )
                check_rows(rows, entry, self._where, numbers)
        return (
            f"checked {', '.join(partly)}; ranks check the others as they read them"
            if partly
            else ""
        )

    def _rows_and_numbers(
        self, array: Array, entry: InputRange, samples: range | SampleNumbers
    ) -> tuple[np.ndarray, range | SampleNumbers]:
        """Return (rows, numbers) for the stored samples with the indices `samples`.

        rows: their rows of the array. If `samples` is a range, a single slice of the array.
        numbers: the number of each of these rows in the array.
        """
        assert entry.batch_axis is not None
        extent = rows_per_sample(entry, self._manifest)
        before = (slice(None),) * entry.batch_axis
        if isinstance(samples, range):
            numbers = range(samples.start * extent, samples.stop * extent)
            return array[(*before, slice(numbers.start, numbers.stop))], numbers
        rows = (samples[:, None] * extent + np.arange(extent)).reshape(-1)
        return array[(*before, rows)], rows

    def notes(self, steps: int) -> list[str]:
        """Return lines for the user about a run of `steps` steps: how the files were interpreted,
        and which samples are skipped, repeated or missing. Empty if there is nothing to say.
        """
        described = [f"{self._where}: {text}"] if (text := self._stored.describe()) else []
        order = self._order
        batch = self._manifest.batch_size
        if order is None:
            return described
        samples = f"{self._where}: {order.samples:,} {plural(order.samples, 'sample')}"
        batches = order.steps_per_epoch
        rest = order.samples % batch
        if self._manifest.train:
            ending = (
                f", the last {order.skipped_samples:,} of each epoch left out"
                if order.skipped_samples
                else ""
            )
            if rest and not order.skipped_samples:
                ending = f", the last of {rest:,}, filled up with samples that count nothing"
            if steps > batches:
                ending += (
                    f"; {steps:,} {plural(steps, 'step goes', 'steps go')} on into epoch "
                    f"{self.epoch(steps - 1):,}"
                )
        else:
            ending = f", the last of {rest:,}" if rest and steps >= batches else ""
            without = [
                repr(output.value.name)
                for output in self._manifest.outputs
                if output.batch_axis is None
            ]
            if ending and without:
                ending += (
                    f" ({', '.join(without)}: the last value also counts what fills its "
                    "micro-batch up)"
                )
            if steps > batches:
                ending += f"; it ends before step {batches:,} of {steps:,}"
        return (
            [*described, f"{samples} are {batches:,} {plural(batches, 'batch')} of {batch}{ending}"]
            if ending
            else described
        )


_Batch = Mapping[str, Any]
FUNCTION_PARAMETERS_HINT = "it takes none, or some, of step, batch_size and seed"


class FunctionSource(SampleSource):
    """A source that calls a Python function, given as `module:function`. The function provides
    batches: mappings from input name to array.

    If the function has a parameter `step`, it is called once per step. It returns the batch of this
    step, or None after the last batch.

    Otherwise the function is called once per epoch. It returns an iterable of the batches of
    consecutive steps; the end of the iterable is the end of the epoch. An iterable cannot start in
    the middle, so a run that resumes also reads the batches of earlier steps.

    In both cases the function may have parameters `batch_size` and `seed`.
    """

    def __init__(
        self, manifest: Manifest, name: str, seed: int, begin: RunProgress, settings: DataSettings
    ) -> None:
        """Import the function `name` (`module:function`) and check its parameters. Raise
        ConfigurationError if this fails, or if the settings request shuffling, or a number of
        epochs for a function of the step.
        """
        module, _, function = name.rpartition(":")
        super().__init__(manifest, begin)
        self._name = name
        self._keeps_last = not manifest.train or settings.last_batch == "pad"
        self._epochs = settings.epochs if manifest.train else 1
        if settings.shuffle:
            hint = f"shuffle the batches in {function}, which can have a parameter seed"
            raise ConfigurationError(
                "data.shuffle is not supported for batches of a function", hint, name
            )
        try:
            self._function = getattr(_import_module(module), function)
            takes = inspect.signature(self._function).parameters
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"data function {name!r} cannot be imported: {error}"
            ) from error
        given = {"step": 0, "batch_size": manifest.batch_size, "seed": seed}
        self._by_step = "step" in takes
        self._given = {each: given[each] for each in takes if each in given}
        if any(
            each.default is each.empty
            and each.name not in given
            and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
            for each in takes.values()
        ):
            raise ConfigurationError(
                f"data function {name!r} has the parameters {', '.join(takes)}",
                hint=FUNCTION_PARAMETERS_HINT,
            )
        if self._by_step and manifest.train and settings.epochs is not None:
            raise ConfigurationError(
                "data.epochs is not supported for a function of the step",
                hint="set --steps",
                where=name,
            )
        self._batches = self._batches_with_epoch()
        self._step = begin.steps - 1 if self._by_step else -1
        self._current: tuple[int, _Batch, int] = (1, {}, manifest.batch_size)

    def sample_count(self, step: int) -> int:
        """Return the number of samples that the function provides for a step; 0 if the batches have
        ended.

        The batch is read only if its size is needed: in inference, if the number of epochs is
        limited, or if training keeps an epoch's incomplete last batch. Otherwise every step has a
        full batch, and a rank that reads no input need not call the function.
        """
        if self._manifest.train and self._epochs is None and not self._keeps_last:
            return self._manifest.batch_size
        return self._current[2] if self._advance(step) else 0

    def epoch(self, step: int) -> int:
        return self._current[0]

    def rows(self, entry: InputRange, start: int, stop: int) -> np.ndarray:
        begin = self._begin
        batch_size = self._manifest.batch_size
        name = entry.value.name
        step = begin.steps + (start - begin.samples) // batch_size
        where = f"{self._name}, batch {step}"
        if not self._advance(step):
            raise ConfigurationError(
                f"the data function has no batch {step}", hint="set --steps", where=where
            )
        _, batch, _ = self._current
        if name not in batch:
            raise ConfigurationError(
                f"a batch of the data function lacks input {name!r}", where=self._name
            )
        array = np.asarray(batch[name])
        if entry.batch_axis is None:
            return convert_rows(array, entry, where)
        offset = begin.samples + (step - begin.steps) * batch_size
        extent = rows_per_sample(entry, self._manifest)
        first = (start - offset) * extent
        last = (stop - offset) * extent
        rows = array[(slice(None),) * entry.batch_axis + (slice(first, last),)]
        return convert_rows(rows, entry, where, range(first, last))

    def _advance(self, step: int) -> bool:
        """Make the batch of `step` the current batch, by reading further batches. Return False if
        the batches end before it.
        """
        while self._step < step:
            if self._by_step:
                self._step = step - 1
            if (found := next(self._batches, None)) is None:
                return False
            self._current = found
            self._step += 1
        return True

    def _batches_with_epoch(self) -> Iterator[tuple[int, _Batch, int]]:
        """Yield (epoch, batch, number of samples of the batch) for all epochs. Only the last batch
        of an epoch may have less than a full batch of samples; it is skipped if the settings say
        so. Raise ConfigurationError for other invalid batches.
        """
        batch_size = self._manifest.batch_size
        for epoch in itertools.count(1):
            if self._epochs is not None and epoch > self._epochs:
                return
            number = -1
            short = None
            for number, batch in self._batches_of_epoch():
                if short is not None:
                    message = (
                        f"batch {number - 1} has {short[1]} {plural(short[1], 'sample')}, "
                        f"not {batch_size}, and is not the last"
                    )
                    raise ConfigurationError(message, where=self._name)
                if not isinstance(batch, Mapping):
                    message = (
                        f"batch {number} is {type(batch).__name__}, not a dict of arrays by input"
                    )
                    raise ConfigurationError(message, where=self._name)
                shapes = {name: np.shape(array) for name, array in batch.items()}
                count = count_samples(self._manifest, shapes, f"{self._name}, batch {number}")
                if count is None or count == batch_size:
                    yield epoch, batch, batch_size
                elif count > batch_size:
                    raise ConfigurationError(
                        f"batch {number} contains {count} {plural(count, 'sample')}, expected "
                        f"{batch_size}",
                        where=self._name,
                    )
                else:
                    short = batch, count
            if short is not None and self._keeps_last:
                yield epoch, *short
            self.skipped_samples = 0 if short is None or self._keeps_last else short[1]
            if self._by_step or not self._manifest.train:
                return
            if number < 0 or (number == 0 and short and not self._keeps_last):
                raise ConfigurationError(
                    f"epoch {epoch} contains less than a batch of {batch_size} "
                    f"{plural(batch_size, 'sample')}",
                    where=self._name,
                )

    def _batches_of_epoch(self) -> Iterator[tuple[int, Any]]:
        """Yield (number, batch) for the batches of one epoch, as the function returns them. A
        function with a parameter `step` is called from the current step on, until it returns None.
        """
        if not self._by_step:
            yield from enumerate(self._function(**self._given))
            return
        step = self._step + 1
        while (batch := self._function(**{**self._given, "step": step})) is not None:
            yield step, batch
            step = max(step, self._step) + 1


def check_data(
    manifest: Manifest,
    data: str | None,
    steps: int | None,
    settings: DataSettings | None = None,
    begin: RunProgress = START_OF_RUN,
) -> tuple[StoredSource | None, str]:
    """Check the stored arrays at `data` before ranks start. Return (source, note).

    source: the source on the arrays; None if `data` names a function or random values, which are
    not checked.
    note: a line about arrays that were checked only in part, otherwise "".

    The check covers the samples that `steps` steps read; all samples if `steps` is None or the data
    are shuffled. Raise ConfigurationError if the arrays do not fit the model or each other.
    """
    if data is None or is_data_function(data):
        return None, ""
    settings = settings or DataSettings()
    source = StoredSource(manifest, open_arrays(manifest, data, settings), 0, begin, settings)
    return source, source.check(
        None if steps is None or settings.shuffle else steps * manifest.batch_size
    )


def _import_module(name: str) -> ModuleType:
    """Import the module `name` and return it. A module in the current folder takes precedence over
    the module path, except over modules of the standard library or modules that are already
    imported. If the module is in the current folder, the folder is appended to `sys.path`, so that
    the module can import modules next to it.
    """
    folder = os.getcwd()
    first = name.partition(".")[0]
    spec = (
        None
        if first in sys.modules or first in sys.stdlib_module_names
        else PathFinder.find_spec(first, [folder])
    )
    if spec is not None and folder not in sys.path:
        sys.path.append(folder)
    if spec is not None and spec.origin is not None and spec.loader is not None:
        found = sys.modules[first] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
    return importlib.import_module(name)
