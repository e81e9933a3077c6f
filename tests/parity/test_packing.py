"""--ignore-padded-rows: valid rows are exact whatever stands at padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph.compiling.pipeline import pipeline
from attngraph.errors import UsageError
from attngraph.export.files.save import to_session
from attngraph.export.lowering.lower import lower
from attngraph.export.runtime.session import Session
from attngraph.export.target import Target
from attngraph.frontend.model import Model, trace
from attngraph.ir import Graph
from attngraph.optimized import Optimized
from attngraph.passes import run
from examples import bert, nanogpt

pytestmark = pytest.mark.wide

BATCH, LENGTH, WIDTH = 3, 12, 32
CPU = Target("cpu")


def _mask(kind: str, batch: int = BATCH, length: int = LENGTH) -> Tensor:
    """True where there is a token."""
    mask = torch.ones(batch, length, dtype=torch.bool)
    if kind == "right":
        mask[1, length // 2 :] = False
    elif kind == "left":
        mask[1, : length // 2] = False
        mask[2, :1] = False
    elif kind == "holes":
        mask[:, 2] = mask[0, 0] = mask[1, 5:8] = False
    elif kind == "random":
        mask = torch.rand(batch, length, generator=torch.Generator().manual_seed(1)) < 0.4
    elif kind == "empty element":
        mask[1] = False
    elif kind == "nothing":
        mask[:] = False
    return mask


MASKS = ["all", "right", "left", "holes", "random", "empty element", "nothing"]


def _error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, in units of the last place on the expected scale."""
    if not expected.numel():
        return 0.0
    scale = float(expected.abs().max()) * torch.finfo(expected.dtype).eps
    return float((found - expected).abs().max()) / scale


def _rounding(found: Tensor, expected: Tensor) -> None:
    """Two layers of float32 in another order: the budget of parity allows as much."""
    assert found.isfinite().all()
    assert _error(found, expected) < 32


class Encoder(nn.Module):
    """Torch's own layers, for x (B, T, C) and a mask (B, T) that is true at tokens."""

    def __init__(self, *, norm_first: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True, norm_first=norm_first
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        encoded: Tensor = self.layers(x, src_key_padding_mask=~mask)
        return encoded


class MaskedMean(Encoder):
    """The mean over valid tokens, which weighs padding with zero."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        weight = mask.unsqueeze(-1).to(x.dtype)
        return (super().forward(x, mask) * weight).sum(1) / weight.sum(1)


class FilledMaximum(Encoder):
    """The maximum over valid tokens: padding is filled with the lowest float."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        filled = super().forward(x, mask).masked_fill(~mask.unsqueeze(-1), -1e9)
        return filled.amax(1)


class Mean(Encoder):
    """The mean over all tokens, padding too."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x, mask).mean(1)


class Unmasked(Encoder):
    """The memory of a decoder whose cross attention sees padding, as it does by default."""

    def __init__(self, *, hide: bool = False) -> None:
        super().__init__()
        self.hide = hide
        layer = nn.TransformerDecoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 1)
        self.queries = nn.Parameter(torch.randn(1, LENGTH, WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        memory = super().forward(x, mask)
        queries = self.queries.expand(x.shape[0], -1, -1)
        hidden = ~mask if self.hide else None
        decoded: Tensor = self.decoder(queries, memory, memory_key_padding_mask=hidden)
        return decoded


def _compiled(module: nn.Module, args: tuple[Tensor, ...], **options: Any) -> Optimized:
    batch, length = Dim("batch", max=64), Dim("length", max=64)
    shapes = tuple({0: batch, 1: length} for _ in args)
    return attngraph.optimize(
        module.eval(), args, dynamic_shapes=shapes, ignore_padded_rows=True, **options
    )


def _packed_linears(optimized: Optimized) -> tuple[int, int]:
    """The linears over (1, N, …), and all others."""
    linears = [node for node in optimized.graph if node.op == "aten.linear"]
    packed = [node for node in linears if node.output.shape[0] == 1]
    return len(packed), len(linears) - len(packed)


def _x(batch: int = BATCH, length: int = LENGTH) -> Tensor:
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=[False, True], ids=["norm last", "norm first"])
def encoder(request: pytest.FixtureRequest) -> tuple[Encoder, Optimized]:
    torch.manual_seed(0)
    module = Encoder(norm_first=request.param).eval()
    verify = "each" if request.param else "final"  # the passes that pack are the same for both
    return module, _compiled(module, (_x(), _mask("right")), verify=verify)


@pytest.mark.parametrize("kind", MASKS)
def test_valid_rows_are_exact(encoder: tuple[Encoder, Optimized], kind: str) -> None:
    module, optimized = encoder
    for batch, length in ((BATCH, LENGTH), (5, 17)):
        x, mask = _x(batch, length), _mask(kind, batch, length)
        with torch.no_grad():
            expected = module(x, mask)
        _rounding(optimized(x, mask)[mask], expected[mask])


def test_every_linear_is_packed(encoder: tuple[Encoder, Optimized]) -> None:
    assert _packed_linears(encoder[1]) == (12, 0)


def test_padded_rows_may_be_anything(encoder: tuple[Encoder, Optimized]) -> None:
    """Poison: not one bit of a valid row depends on what stands at padding."""
    _, optimized = encoder
    for kind in ("right", "left", "holes", "random"):
        x, mask = _x(), _mask(kind)
        poisoned = torch.where(mask.unsqueeze(-1), x, 1e30)
        poisoned[:, 0] = x[:, 0]  # the first row is always computed
        assert torch.equal(optimized(x, mask)[mask], optimized(poisoned, mask)[mask])


def test_elements_of_a_batch_stay_apart(encoder: tuple[Encoder, Optimized]) -> None:
    """A NaN among the tokens of one element is not copied to the padding of the next."""
    module, optimized = encoder
    x, mask = _x(), _mask("left")
    x[0, -1] = torch.nan
    with torch.no_grad():
        expected = module(x, mask)
    assert expected[1:].isfinite().all()
    _rounding(optimized(x, mask)[1:][mask[1:]], expected[1:][mask[1:]])


def test_the_report_says_what_was_packed_and_compared(encoder: tuple[Encoder, Optimized]) -> None:
    report = encoder[1].report
    assert any("8 linears" in note and "mask leaves unmasked" in note for note in report.notes)
    assert report.parity is not None
    assert "rows: the others are padding" in str(report.parity)


def _with_packed_attention(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Session, Graph]:
    """Compiled as for a target with kernels for attention over packed rows, to run here."""
    batch, length = Dim("batch", max=64), Dim("length", max=64)
    shapes = tuple({0: batch, 1: length} for _ in args)
    graph = trace(Model(module.eval(), None, args, {}, shapes)).graph
    run(graph, pipeline(ignore_padded_rows=True, packed_attention=True))
    return to_session(lower(graph, target=CPU), CPU), graph


@pytest.mark.parametrize("kind", [Encoder, MaskedMean, Unmasked])
def test_attention_over_packed_rows_is_exact(kind: type[Encoder]) -> None:
    """Whatever the padding is like; a cross attention to the tokens keeps its layout."""
    torch.manual_seed(0)
    module = (Unmasked(hide=True) if kind is Unmasked else kind()).eval()
    session, graph = _with_packed_attention(module, (_x(), _mask("right")))
    assert [node.op for node in graph].count("attn.packed_attention") == 2
    for padding in MASKS:
        for batch, length in ((BATCH, LENGTH), (5, 17)):
            x, mask = _x(batch, length), _mask(padding, batch, length)
            with torch.no_grad():
                expected = module(x, mask)
            (found,) = session.run([x, mask])
            rows = mask if kind is Encoder else mask.any(1)
            _rounding(found[rows], expected[rows])


def test_packed_elements_stay_apart() -> None:
    """A NaN in one element reaches no other, through attentions of either layout."""
    module = Unmasked(hide=True).eval()
    session, _ = _with_packed_attention(module, (_x(), _mask("right")))
    x, mask = _x(), _mask("left")
    x[0, -1] = torch.nan
    with torch.no_grad():
        expected = module(x, mask)
    _rounding(session.run([x, mask])[0][1:], expected[1:])


@pytest.mark.parametrize("pooled", [MaskedMean, FilledMaximum])
def test_pooling_that_leaves_padding_out_is_exact(pooled: type[Encoder]) -> None:
    torch.manual_seed(0)
    module = pooled().eval()
    optimized = _compiled(module, (_x(), _mask("right")))
    assert _packed_linears(optimized) == (12, 0)
    for kind in ("all", "right", "left", "holes"):
        with torch.no_grad():
            _rounding(optimized(_x(), _mask(kind)), module(_x(), _mask(kind)))


def test_a_mean_over_padding_keeps_what_it_reads() -> None:
    """Then every row but the last layer's keys and values is needed, and the mean is named."""
    torch.manual_seed(0)
    module = Mean().eval()
    with pytest.raises(UsageError, match="reads their rows there") as caught:
        _compiled(module, (_x(), _mask("right")))
    assert "aten.mean" in str(caught.value)
    assert "Leave out --ignore-padded-rows." in str(caught.value)


def test_a_decoder_that_sees_padding_keeps_it() -> None:
    torch.manual_seed(0)
    with pytest.raises(UsageError, match=r"attn.attention at .* reads their rows there"):
        _compiled(Unmasked(), (_x(), _mask("right")))


def test_queries_that_are_no_tokens_stay_whole() -> None:
    """As many learned queries as tokens: their rows are no padding, whatever the mask says."""
    torch.manual_seed(0)
    module = Unmasked(hide=True).eval()
    args = _x(), _mask("right")
    optimized = attngraph.optimize(module, args, ignore_padded_rows=True)
    assert _packed_linears(optimized)[1] == 3  # the cross attention's out and the feed-forward
    with torch.no_grad():
        for kind in ("all", "right", "left", "holes"):
            _rounding(optimized(_x(), _mask(kind)), module(_x(), _mask(kind)))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_bert_of_transformers(attention: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=100,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
        attn_implementation=attention,
    )
    torch.manual_seed(0)
    module = transformers.BertModel(config).eval()
    ids = torch.randint(100, (BATCH, LENGTH))
    optimized = _compiled(module, (ids, _mask("right").long()))
    assert _packed_linears(optimized)[0] == 12
    for kind in MASKS:
        mask = _mask(kind)
        with torch.no_grad():
            expected = module(ids, mask.long())
        found = optimized(ids, mask.long())
        _rounding(found.last_hidden_state[mask], expected.last_hidden_state[mask])
        _rounding(found.pooler_output[mask[:, 0]], expected.pooler_output[mask[:, 0]])
        other = torch.where(mask, ids, 99 - ids)
        other[:, 0] = ids[:, 0]
        states = optimized(other, mask.long()).last_hidden_state
        assert torch.equal(states[mask], found.last_hidden_state[mask])


def test_the_encoder_of_the_examples() -> None:
    module, (ids, kinds, mask), shapes = bert.build()
    module.eval()
    optimized = attngraph.optimize(
        module, (ids, kinds, mask), dynamic_shapes=shapes, ignore_padded_rows=True
    )
    assert _packed_linears(optimized)[1] == 0
    with torch.no_grad():
        _rounding(optimized(ids, kinds, mask)[mask], module(ids, kinds, mask)[mask])


class Causal(nn.Module):
    """A decoder's layer: causal, with padding on either side."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        length = x.shape[1]
        query, key, value = self.project(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        mixed = nn.functional.scaled_dot_product_attention(
            query, key, value, causal & mask[:, None, None, :]
        )
        joined: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return x + joined


def test_a_causal_decoder() -> None:
    torch.manual_seed(0)
    module = Causal().eval()
    optimized = _compiled(module, (_x(), _mask("left")))
    assert _packed_linears(optimized) == (4, 0)
    for kind in MASKS:
        mask = _mask(kind)
        with torch.no_grad():
            _rounding(optimized(_x(), mask)[mask], module(_x(), mask)[mask])


def test_a_model_without_a_padding_mask_is_refused() -> None:
    module, args = nanogpt.build()[:2]
    with pytest.raises(UsageError, match="No attention hides keys by a mask"):
        attngraph.optimize(module, args, ignore_padded_rows=True)
