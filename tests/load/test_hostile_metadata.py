"""What metadata of a file, or settings of an adapter, say is checked before it is made use of."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from attngraph.checkpoints.adapter_settings import _fits, scale_of
from attngraph.compiling.provenance import Provenance
from attngraph.decoding.rules import Rules
from attngraph.decoding.seq2seq import Wiring
from attngraph.errors import AttngraphError, LoadError
from attngraph.export.precision.quantize import Rounding
from attngraph.export.runtime.saturation import ROUNDING_KEY, require_exact
from attngraph.frontend.families.cache import Layout
from attngraph.frontend.families.image_sizes import Tiles
from attngraph.frontend.families.joining import Joining
from attngraph.ir.ranges import RANGES_KEY, Ranges
from attngraph.metadata import record

FILE = Path("model.onnx")
LAYOUT = Layout("ids", "logits", ("k",), ("k_out",), "batch", "past", axes=(2,), max_length=8)
ROUNDING = Rounding("int8", True, frozenset(["a"]), {"b": "c"})
JOINING = Joining(7, tiles=Tiles(8, 2, ((8, 16), (16, 8))))
RULES = Rules((1,), bad_words_ids=((1, 2), (3,)), repetition_penalty=2.0)


def _made(passes: str) -> Any:
    return Provenance.read({"attngraph.options": passes}, FILE)


def _rounded(text: str) -> Any:
    return Provenance.read({ROUNDING_KEY: text}, FILE)


READERS: Mapping[str, Callable[[str], Any]] = {
    "layout": lambda text: Layout.from_json(text, "model.onnx"),
    "wiring": lambda text: Wiring.from_json(text, "model.onnx"),
    "joining": lambda text: Joining.from_json(text, "model.onnx"),
    "rules": lambda text: Rules.from_json(text, "model.onnx"),
    "ranges": lambda text: Ranges.of_file({RANGES_KEY: text}, FILE),
    "rounding": _rounded,
    "exactness": lambda text: require_exact({ROUNDING_KEY: text}),
    "passes": _made,
    "codes": lambda text: Provenance.read({"attngraph.codes": text}, FILE),
}
TEXTS = {
    "deep list": "[" * 100_000,
    "deep object": '{"pasts":' * 100_000,
    "list": "[1]",
    "number": "1" * 10_000,
    "text": '"ids"',
    "cut short": '{"ids": "x"',
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_what_is_no_object_is_a_sentence(reader: Callable[[str], Any], text: str) -> None:
    with pytest.raises(AttngraphError) as caught:
        reader(text)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "kept", [LAYOUT, ROUNDING, RULES, JOINING], ids=lambda kept: type(kept).__name__
)
def test_what_was_written_is_read(kept: Any) -> None:
    assert record(type(kept), kept.to_json()) == kept


@pytest.mark.parametrize(
    "change",
    [
        {"pasts": 5},
        {"pasts": "past"},
        {"pasts": [["k"]]},
        {"axes": [True]},
        {"max_length": "8"},
        {"max_length": 8.5},
        {"embeds": 1},
        {"ids": None},
        {"code": "x"},
        {"__class__": "x"},
    ],
    ids=str,
)
def test_a_field_of_another_kind_is_a_sentence(change: dict[str, object]) -> None:
    text = json.dumps({**json.loads(LAYOUT.to_json()), **change})
    with pytest.raises(LoadError, match="which of its inputs are the cache"):
        Layout.from_json(text, "model.onnx")


@pytest.mark.parametrize(
    "relation",
    {
        "power of powers": "9**9**9**9 <= n",
        "powers in turn": "((((9**60)**60)**60)**60)**60 <= n",
        "parentheses": "(" * 50_000 + "n" + ")" * 50_000 + " <= 3",
        "signs": "-" * 9_000 + "n <= 3",
        "sum": " + ".join(["n"] * 100_000) + " <= 3",
        "shorter sum": "+".join(["n"] * 5_000) + " <= 3",
        "digits": "9" * 3_000 + " <= n",
        "no divisor": "n // 0 <= 3",
        "no modulus": "n % (n - n) == 0",
        "code": "__import__('os').system('true') <= 3",
    }.items(),
    ids=lambda named: named[0],
)
def test_a_condition_that_takes_for_ever_is_refused(relation: tuple[str, str]) -> None:
    begin = time.process_time()
    said = json.dumps({"dims": {"n": [1, None]}, "relations": [relation[1]]})
    with pytest.raises(AttngraphError, match="ranges of its dims can't be read"):
        Ranges.of_file({RANGES_KEY: said}, FILE)
    assert time.process_time() - begin < 5


@pytest.mark.parametrize(
    "pattern",
    [r"(a+)+x", r"(\w*)*x", r"(?:a|a)*x", ".*.*.*.*x", r"(.)\1*\1*x", "(?=a*)x", "a{9}{9}{9}{9}"],
)
def test_a_pattern_that_takes_for_ever_is_refused(pattern: str) -> None:
    begin = time.process_time()
    with pytest.raises(LoadError, match="which repeats more than"):
        _fits(pattern, "a" * 60, FILE)
    assert time.process_time() - begin < 1


def test_patterns_of_layers_are_patterns() -> None:
    name = "model.layers.11.self_attn.q_proj"
    assert _fits("q_proj", name, FILE)
    assert _fits(r"layers\.\d+\.self_attn\.(q|v)_proj", name, FILE)
    assert _fits(r".*\.[0-9]+\..*_proj", name, FILE)
    assert not _fits(r"layers\.1\..*", name, FILE)
    with pytest.raises(LoadError, match=r"unterminated|missing"):
        _fits("(q_proj", name, FILE)


@pytest.mark.parametrize(
    ("settings", "rank"), [({"lora_alpha": "x"}, 4), ({"lora_alpha": [1]}, 4), ({}, 0)]
)
def test_a_scale_that_is_no_number_is_a_sentence(settings: dict[str, Any], rank: int) -> None:
    with pytest.raises(LoadError, match=r"scales q_proj by .* save the adapter again"):
        scale_of("q_proj", rank, {"r": rank, **settings}, FILE)


def test_a_rank_that_the_factors_lack_is_a_sentence() -> None:
    with pytest.raises(LoadError, match=r"says the rank 8 for q_proj, and its factors have 4"):
        scale_of("q_proj", 4, {"r": 8}, FILE)
