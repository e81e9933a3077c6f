"""onnxruntime-genai generates eager's tokens with the files that `--for genai` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy
import onnxruntime_genai
import pytest
import torch
from torch import nn

import attngraph
from attngraph import Decoder
from attngraph.options import CacheKind
from attngraph.runtimes.genai import Generation, write_config
from tests.parity.test_decode import PROMPT, prompts
from tests.runtimes.conftest import Record
from tests.runtimes.families import DECODERS, EOS, PAD, WINDOWED, decoder

ROOM, TOTAL = 48, PROMPT + 12
PACKAGE = "onnxruntime-genai"


class Written(NamedTuple):
    family: str
    cache: CacheKind
    module: nn.Module
    compiled: Decoder
    folder: Path

    def generator(self, rows: list[list[int]], **search: Any) -> Any:
        """One that has read the rows, padded on the right, as genai pads them."""
        model = onnxruntime_genai.Model(str(self.folder))
        params = onnxruntime_genai.GeneratorParams(model)
        params.set_search_options(max_length=TOTAL, batch_size=len(rows), **search)
        generator = onnxruntime_genai.Generator(model, params)
        generator.append_tokens(padded(rows))
        return generator

    def expected(self, row: list[int], total: int, **search: Any) -> list[int]:
        """What transformers makes of one row alone."""
        found = self.module.generate(
            torch.tensor([row]), max_new_tokens=total - len(row), do_sample=False,
            eos_token_id=EOS, pad_token_id=PAD, **search,
        )  # fmt: skip
        return found[0].tolist()


def padded(rows: list[list[int]]) -> numpy.ndarray:
    width = max(map(len, rows))
    return numpy.array([[*row, *[PAD] * (width - len(row))] for row in rows], numpy.int32)


def finished(generator: Any) -> Any:
    while not generator.is_done():
        generator.generate_next_token()
    return generator


ROW, SHORTER = ([row.tolist() for row in prompts(2)[0]][place] for place in (0, 1))
SHORTER = SHORTER[2:]


def write(
    family: str, cache: CacheKind, folder: Path, weights: attngraph.export.formats.Weights | None
) -> Written:
    module = decoder(family)
    room = ROOM if cache == "static" else None
    compiled = attngraph.optimize_decoder(
        module, cache=cache, max_length=room, all_logits=True, weights=weights, verify="off"
    )
    compiled.save(folder / "model.onnx")
    write_config(folder, compiled, Generation.of(module))
    return Written(family, cache, module, compiled, folder)


CASES = [(family, cache) for family in DECODERS for cache in ("growing", "static")]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    family, cache = request.param
    return write(family, cache, tmp_path_factory.mktemp("genai"), None)


def test_greedy_tokens_are_those_of_transformers(written: Written, record: Record) -> None:
    found = finished(written.generator([ROW])).get_sequence(0).tolist()
    assert found == written.expected(ROW, TOTAL)
    assert len(set(found[PROMPT:])) > 1
    record(PACKAGE, written.family, f"{written.cache} cache")


def test_rows_of_a_batch_are_padded_on_the_right(written: Written, record: Record) -> None:
    # A window counts the padding between a prompt and what follows: `notes_of` says so.
    rows = [ROW, ROW[::-1]] if written.family in WINDOWED else [ROW, SHORTER]
    generator = finished(written.generator(rows))
    for place, row in enumerate(rows):
        after = generator.get_sequence(place).tolist()[PROMPT:]
        assert after == written.expected(row, len(row) + len(after))[len(row) :]
    what = "a batch of one length" if written.family in WINDOWED else "a padded batch"
    record(PACKAGE, written.family, what)


def test_beams(written: Written, record: Record) -> None:
    found = finished(written.generator([ROW], num_beams=3)).get_sequence(0).tolist()
    assert found == written.expected(ROW, TOTAL, num_beams=3, early_stopping=True)
    record(PACKAGE, written.family, "beams")


def test_rewinding_goes_on_as_before(written: Written, record: Record) -> None:
    generator = written.generator([ROW])
    for _ in range(5):
        generator.generate_next_token()
    generator.rewind_to(PROMPT + 2)
    assert finished(generator).get_sequence(0).tolist() == written.expected(ROW, TOTAL)
    record(PACKAGE, written.family, "rewind")


def test_tokens_appended_mid_way(written: Written, record: Record) -> None:
    """genai never feeds the token that it drew last before it appends others, so that one is taken
    back and appended with them. Without a shared buffer it fails, for any file."""
    generator = written.generator([ROW])
    for _ in range(3):
        generator.generate_next_token()
    last = int(generator.get_sequence(0)[-1])
    if written.cache == "growing":
        with pytest.raises(Exception, match="Non-zero status code"):
            generator.append_tokens(numpy.array([[5, 6, 7]], numpy.int32))
        return
    generator.rewind_to(PROMPT + 2)
    generator.append_tokens(numpy.array([[last, 5, 6, 7]], numpy.int32))
    whole = [*written.expected(ROW, PROMPT + 3), 5, 6, 7]
    assert finished(generator).get_sequence(0).tolist() == written.expected(whole, TOTAL)
    record(PACKAGE, written.family, "append, static cache")


def test_positions_are_given_where_the_file_takes_them(tmp_path: Path, record: Record) -> None:
    module = decoder("GPT-2")
    compiled = attngraph.optimize_decoder(
        module, cache="static", max_length=ROOM, all_logits=True, position_ids=True, verify="off"
    )
    compiled.save(tmp_path / "model.onnx")
    write_config(tmp_path, compiled, Generation.of(module))
    made = Written("GPT-2", "static", module, compiled, tmp_path)
    generator = finished(made.generator([ROW, SHORTER]))
    for place, row in enumerate([ROW, SHORTER]):
        after = generator.get_sequence(place).tolist()[PROMPT:]
        assert after == made.expected(row, len(row) + len(after))[len(row) :]
    record(PACKAGE, "GPT-2", "positions given")


@pytest.mark.parametrize("cache", ["growing", "static"])
def test_weights_of_4_bits_give_the_tokens_of_our_own_session(
    cache: CacheKind, tmp_path: Path, record: Record
) -> None:
    made = write("Llama", cache, tmp_path, "int4")
    found = finished(made.generator([ROW])).get_sequence(0).tolist()
    expected = made.compiled.generate(torch.tensor([ROW]), TOTAL - PROMPT, eos_token_id=EOS)
    assert found == expected[0].tolist()
    record(PACKAGE, "Llama", f"int4, {cache} cache")
