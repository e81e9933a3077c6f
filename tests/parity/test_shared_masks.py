"""A mask is built once for each kind of layer; not at all where it is known or hides nothing."""

from __future__ import annotations

import pytest

from attngraph.ir import Graph, Node, Value
from attngraph.ir.ops import attribute, input_of
from tests.parity.shared import assert_built_once, compiled

pytestmark = pytest.mark.wide

WINDOW = "sliding_window=6 num_hidden_layers={n}"

# the corpus's row, the attention, its options, the two types of its layers
KINDS: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "causal": ("llama", "sdpa", "num_hidden_layers={n}", ()),
    "windows of Mistral": ("mistral", "sdpa", WINDOW, ()),
    "windows of Phi-3": ("phi3", "sdpa", WINDOW, ()),
    "every other layer of Gemma 2": (
        "gemma2",
        "eager",
        WINDOW,
        ("sliding_attention", "full_attention"),
    ),
    "every other layer of Gemma 3": (
        "gemma3_text",
        "sdpa",
        WINDOW,
        ("sliding_attention", "full_attention"),
    ),
    "chunks of Llama 4": (
        "llama4_text",
        "sdpa",
        "num_hidden_layers={n} attention_chunk_size=6 no_rope_layers=[1,0,1,0]",
        ("chunked_attention", "full_attention"),
    ),
}


def _row(name: str, layers: int, dims: str = "dims=batch,seq") -> tuple[str, str]:
    row, attention, options, types = KINDS[name]
    if types:
        options += f" layer_types={list(types) * (layers // 2)}".replace(", ", ",")
    return f"{row} {options.replace('{n}', str(layers))} {dims}", attention


def _attentions(graph: Graph) -> list[Node]:
    return [node for node in graph if node.op == "attn.attention"]


def _masks(graph: Graph) -> list[Value | None]:
    masks: list[Value | None] = [input_of(node, "mask") for node in _attentions(graph)]
    return masks


@pytest.mark.parametrize("name", list(KINDS))
def test_each_kind_of_layer_has_one_mask(name: str) -> None:
    few, many = (compiled(*_row(name, layers)) for layers in (2, 4))
    assert len(_attentions(many)) == 4
    kinds = max(1, len(KINDS[name][3]))
    assert len({*_masks(many)}) == len({*_masks(few)}) == kinds
    assert None not in _masks(many)  # the padding
    assert_built_once(few, many)


def test_a_window_that_no_sequence_reaches_is_no_mask() -> None:
    row, attention = _row("windows of Mistral", 2)
    graph = compiled(row.replace("sliding_window=6", "sliding_window=64"), attention, padded=False)
    assert _masks(graph) == [None, None]
    assert [attribute(node, "causal") for node in _attentions(graph)] == [True, True]


@pytest.mark.parametrize("name", ["windows of Mistral", "every other layer of Gemma 2"])
def test_a_window_alone_is_an_attribute(name: str) -> None:
    graph = compiled(*_row(name, 4, dims=""), padded=False)
    assert _masks(graph) == [None] * 4
    windows = [attribute(node, "window") for node in _attentions(graph)]
    assert windows == ([6, 0] * 2 if KINDS[name][3] else [6] * 4)


def test_a_static_mask_is_one_constant() -> None:
    masks = _masks(compiled(*_row("chunks of Llama 4", 4, dims=""), padded=False))
    (chunks,) = {mask for mask in masks if mask is not None}
    assert chunks.is_constant
    assert masks == [chunks, None] * 2
