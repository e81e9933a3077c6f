"""What depends on lengths alone is built once for all layers; with static lengths it folds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from transformers import T5Config, T5EncoderModel

from attngraph.compiling.compiler import Model, analyse
from attngraph.export.lowering.lower import lower
from attngraph.ir import Graph
from tests.parity.shared import assert_built_once, built_of, compiled

pytestmark = pytest.mark.wide

HEADS, DEPTH = 2, 8
WIDTH = HEADS * DEPTH

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
sdpa = nn.functional.scaled_dot_product_attention


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = T5Config(d_model=32, d_kv=8, num_heads=4, d_ff=64, num_layers=3, vocab_size=50)
        self.model = T5EncoderModel(config)

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.model(input_ids=ids).last_hidden_state
        return hidden


class Stack(nn.Module):
    """Layers of self-attention over (B, S, WIDTH), each of which builds its positions anew."""

    def __init__(self, layers: int, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            query, key, value = layer(x).unflatten(-1, (3, HEADS, DEPTH)).permute(2, 0, 3, 1, 4)
            x = x + self.attend(query, key, value).transpose(1, 2).flatten(2)
        return x


def _distances(query: Tensor) -> Tensor:
    """j − i, (S, S)."""
    positions = torch.arange(query.shape[2])
    return positions[None, :] - positions[:, None]


def _window(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    distance = _distances(query)
    return sdpa(query, key, value, (distance <= 0) & (distance > -4))


def _alibi(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    slopes = 2.0 ** -torch.arange(1, HEADS + 1)
    bias = slopes[:, None, None] * _distances(query).abs()
    return sdpa(query, key, value, -bias)


def _buckets(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    near = _distances(query).abs()
    far = 4 + (torch.log(near.clamp(min=1) / 4) * 2).long().clamp(max=3)
    bias = torch.linspace(-1, 1, 8)[torch.where(near < 4, near, far)]
    return sdpa(query, key, value, bias.expand(HEADS, -1, -1))


def _slices(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A table is cut at sizes that went through tensors."""
    span = torch.tensor(min(query.shape[2], 64))
    near = torch.linspace(-1, 1, 128)[64 - span : 64 + span]
    bias = near[(_distances(query) + span).clamp(0, span * 2 - 1)]
    return sdpa(query, key, value, bias.expand(HEADS, -1, -1))


def _sinusoids(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    rates = torch.exp(torch.arange(0, DEPTH, 2) * (-torch.log(torch.tensor(1e4)) / DEPTH))
    angles = torch.arange(query.shape[2])[:, None] * rates
    table = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
    return sdpa(query + table, key + table, value)


def _stretched_rotary(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Its base grows with the length ("dynamic NTK")."""
    length = torch.scalar_tensor(query.shape[2])
    base = 1e4 * (2 * length.clamp(min=8) / 8 - 1) ** (DEPTH / (DEPTH - 2))
    angles = torch.arange(query.shape[2])[:, None] * base ** -(torch.arange(0, DEPTH, 2) / DEPTH)
    cos, sin = (table.repeat(1, 2) for table in (angles.cos(), angles.sin()))

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    return sdpa(turned(query), turned(key), value)


ATTENDS = {
    "window": _window,
    "alibi": _alibi,
    "buckets": _buckets,
    "slices": _slices,
    "sinusoids": _sinusoids,
    "stretched rotary": _stretched_rotary,
}

_LLAMA3 = (
    "{'rope_type':'llama3','factor':8.0,'low_freq_factor':1.0,'high_freq_factor':4.0,"
    "'original_max_position_embeddings':32,'rope_theta':10000.0}"
)
_LONG = (
    (
        "{'rope_type':'longrope','rope_theta':10000.0,'short_factor':[1.0]*8,'long_factor':[2.0]*8,"
        "'factor':2.0,'original_max_position_embeddings':32}"
    )
    .replace("[1.0]*8", str([1.0] * 8))
    .replace("[2.0]*8", str([2.0] * 8))
    .replace(" ", "")
)

# the corpus's row, the attention, how the row is told its layers
POSITIONS = {
    "ALiBi of Bloom": ("bloom", "eager", "n_layer={n} num_hidden_layers={n}"),
    "ALiBi of MPT": ("mpt", "eager", "n_layers={n} num_hidden_layers={n}"),
    "sinusoids of Marian": ("marian", "sdpa", "encoder_layers={n} decoder_layers={n}"),
    "sinusoids of XGLM": ("xglm", "eager", "num_layers={n}"),
    "learned, of GPT-2": ("gpt2", "sdpa", "n_layer={n} num_hidden_layers={n}"),
    "learned, of BERT": ("bert", "sdpa", "num_hidden_layers={n}"),
    "learned, of OPT": ("opt", "sdpa", "num_hidden_layers={n}"),
    "rotary of Llama": ("llama", "sdpa", "num_hidden_layers={n}"),
    "rotary of Llama 3": ("llama", "sdpa", f"num_hidden_layers={{n}} rope_parameters={_LLAMA3}"),
    "rotary of Phi-3, long": (
        "phi3",
        "sdpa",
        f"num_hidden_layers={{n}} original_max_position_embeddings=32 rope_parameters={_LONG}",
    ),
    "relative, of the first DeBERTa": (
        "deberta",
        "eager",
        "num_hidden_layers={n} relative_attention=True position_biased_input=False "
        "pos_att_type=['p2c','c2p']",
    ),
    "relative, of DeBERTa": (
        "deberta-v2",
        "eager",
        "num_hidden_layers={n} relative_attention=True position_biased_input=False "
        "pos_att_type=['p2c','c2p']",
    ),
}


@pytest.mark.parametrize("dynamic", [True, False])
def test_the_buckets_of_t5_are_computed_once_or_never(dynamic: bool) -> None:
    dims: Any = ({0: Dim("batch", max=8), 1: Dim("seq", max=64)},) if dynamic else None
    model = Model(Encoder().eval(), None, (torch.randint(0, 50, (2, 9)),), {}, dims)
    graph, _ = analyse(model)
    ops = Counter(node.op for node in graph)
    assert ops["attn.attention"] == 3
    buckets = [ops[op] for op in ("aten.log", "aten.arange", "aten.where.self")]
    assert buckets == ([1, 1, 1] if dynamic else [0, 0, 0])


def _stack(name: str, layers: int, dims: Any) -> Graph:
    module = Stack(layers, ATTENDS[name]).eval()
    return analyse(Model(module, None, (torch.randn(3, 9, WIDTH),), {}, dims))[0]


@pytest.mark.parametrize("name", ATTENDS)
def test_what_each_layer_builds_is_built_once(name: str) -> None:
    dims: Any = ({0: Dim("batch", max=8), 1: Dim("seq", max=64)},)
    graphs = [_stack(name, layers, dims) for layers in (1, 2)]
    assert bool(built_of(graphs[0])) == (name != "window")  # which becomes an attribute
    assert_built_once(*graphs)


@pytest.mark.parametrize("name", list(ATTENDS))
def test_with_static_lengths_nothing_is_built(name: str) -> None:
    assert not built_of(_stack(name, 2, None))


@pytest.mark.filterwarnings("ignore:The tensor attribute")  # longrope keeps its two tables
@pytest.mark.parametrize("name", POSITIONS)
def test_positions_of_transformers_are_built_once(name: str) -> None:
    row, attention, options = POSITIONS[name]
    row = f"{row} {options} dims=batch,seq"
    graphs = [compiled(row.replace("{n}", str(n)), attention) for n in (1, 2)]
    fused = [Counter(node.op for node in graph)["attn.attention"] for graph in graphs]
    assert fused[1] == 2 * fused[0] > 0
    assert_built_once(*graphs)


def test_bloom_joins_its_mask_and_its_bias_once() -> None:
    """Positions are integers, so what they bias is far from the fill: the mask is a bool one."""
    row = "bloom n_layer={n} num_hidden_layers={n} dims=batch,seq"
    graphs = [compiled(row.replace("{n}", str(n)), "eager") for n in (1, 2)]
    ops = [Counter(node.op_type for node in lower(graph).graph) for graph in graphs]
    assert not {"Where", "Transpose"} & (ops[1] - ops[0]).keys()


def test_relative_biases_of_swin_are_constants() -> None:
    """Windows are static: each block's table is read at compile time."""
    row = "swin depths=[{n},1] image_size=16 window_size=4 patch_size=2 num_heads=[2,4] dims=batch"
    graphs = [compiled(row.replace("{n}", str(n)), "sdpa") for n in (2, 4)]
    assert_built_once(*graphs)
    assert not {"aten.index.Tensor", "aten.embedding"} & {node.op for node in graphs[1]}
