"""What `autopipe generate` refuses before any rank starts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from autopipe.api.generation import read_prompts, write_tokens
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.output_kinds import NPY, OutputFile
from tests.cli.command_line import CommandLine
from tests.exports.decoders import decoder_file

GPT = (
    "zoo build gpt -o gpt.onnx --set layers=1 --set hidden=32 --set heads=2 --set vocabulary=64 "
    "--set sequence=8"
)
DIMS = "--dim sequence_length=1 --dim past_sequence_length=9"
ONE = "--mode infer --cluster cpu-local --gpus 1 --strategy data_parallel --batch-size 2 -q -o"


def test_a_model_without_a_cache(command_line: CommandLine) -> None:
    command_line.done(*GPT.split())
    command_line.done(*f"plan gpt.onnx {ONE} gpt.plan".split())
    command_line.refuses(
        2,
        ("generate", "gpt.plan", "--prompts", "1"),
        "lacks a key-value cache",
        "text-generation-with-past",
    )


def test_prompts_that_the_model_cannot_take(command_line: CommandLine) -> None:
    command_line.done(*f"plan {decoder_file('gpt2')} {DIMS} {ONE} decoder.plan".split())
    command = ("generate", "decoder.plan", "--prompts")
    command_line.refuses(
        2,
        (*command, "256", "--max-new-tokens", 2),
        "prompt 0 contains token 256, but the vocabulary of the model has 256 tokens",
    )
    command_line.refuses(
        2,
        (*command, "1,2", "--max-new-tokens", 10),
        "the program has 10",
        "past_sequence_length=10",
    )
    command_line.refuses(2, (*command, "", "--max-new-tokens", 2), "prompt 0 is empty")
    command_line.refuses(
        2, (*command, "none.json"), "none.json: prompts cannot be read: No such file"
    )
    command_line.refuses(
        2,
        (*command, "1", "--greedy", "--top-k", 5),
        "--greedy excludes sampling: omit --top-k",
    )
    command_line.refuses(2, (*command, "1", "-o", "tokens.txt"), "expected .json or .npy")


def test_a_model_whose_positions_are_places_in_the_cache(command_line: CommandLine) -> None:
    made = onnx.load(decoder_file("gpt2"))
    made.graph.input.remove(next(each for each in made.graph.input if each.name == "position_ids"))
    made.graph.initializer.append(onnx.numpy_helper.from_array(np.array([[9]]), "position_ids"))
    onnx.save(made, command_line.folder / "decoder.onnx")
    command_line.done(*f"plan decoder.onnx {DIMS} {ONE} decoder.plan".split())
    command_line.refuses(
        2, ("generate", "decoder.plan", "--prompts", "1", "--max-new-tokens", 2), "position_ids"
    )


def test_prompts_come_from_files_and_words(tmp_path: Path) -> None:
    rows = tmp_path / "rows.npy"
    lists = tmp_path / "lists.json"
    np.save(rows, np.array([[1, 2], [3, 4]], np.int32))
    lists.write_text("[[1], [2, 3]]", encoding="utf-8")
    assert read_prompts("17,4, 92") == [[17, 4, 92]]
    assert read_prompts(str(rows)) == [[1, 2], [3, 4]]
    assert read_prompts(str(lists)) == [[1], [2, 3]]


@pytest.mark.parametrize(
    "text", ["[]", '{"a": 1}', "[[1.5]]", "[[-1]]", "[[true]]", '["a"]', "[[1], 2]", "[" * 100_000]
)
def test_files_that_hold_no_prompts(tmp_path: Path, text: str) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigurationError, match="prompt"):
        read_prompts(str(path))


def test_an_array_of_objects_is_not_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "prompts.npy"
    np.save(path, np.array([[1], [2, 3]], object), allow_pickle=True)
    with pytest.raises(ConfigurationError, match="prompts cannot be read"):
        read_prompts(str(path))


def test_rows_of_an_array_are_filled_up(tmp_path: Path) -> None:
    write_tokens(OutputFile(tmp_path / "tokens.npy", NPY), [[1, 2, 3], [4]])
    assert np.load(tmp_path / "tokens.npy").tolist() == [[1, 2, 3], [4, -1, -1]]
