"""Which rows are padding is derived: what the report calls specified is eager's, under any mask."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph.checks.padded import Padding, packed_tokens
from attngraph.compiling.pipeline import pipeline
from attngraph.errors import ParityError, UsageError
from attngraph.export.files.save import to_session
from attngraph.export.lowering.lower import lower
from attngraph.frontend.model import Model, trace
from attngraph.passes import PassResult, run
from tests.parity.test_packing import CPU, Causal, Encoder, FilledMaximum, MaskedMean, Unmasked

pytestmark = pytest.mark.wide

BATCH, LENGTH, WIDTH = 4, 9, 32
PAD = 5


class Layer(nn.Module):
    """Post-norm attention in one head and a feed-forward; `keep` broadcasts to (B, S, T)."""

    def __init__(self, *, fill: float = -torch.inf) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.fill = nn.LayerNorm(WIDTH), fill

    def forward(self, x: Tensor, keep: Tensor | None, memory: Tensor | None = None) -> Tensor:
        query = self.project(x).chunk(3, -1)[0]
        key, value = self.project(x if memory is None else memory).chunk(3, -1)[1:]
        scores = query @ key.mT / WIDTH**0.5
        if keep is not None:
            scores = scores.masked_fill(~keep, self.fill)
        mixed = scores.softmax(-1) @ value
        y: Tensor = self.norm(x + self.out(mixed))
        return y


class Stack(nn.Module):
    def __init__(self, layers: int = 2, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(**options) for _ in range(layers))
        self.embed = nn.Embedding(8, WIDTH)


class Types(Stack):
    """One layer for each of two token types, and padding in both."""

    def forward(self, x: Tensor, mask: Tensor, ids: Tensor) -> Tensor:
        x = self.layers[0](x, (mask & (ids % 2 == 0))[:, None])
        y: Tensor = self.layers[1](x, (mask & (ids % 2 == 1))[:, None])
        return y


class Three(Stack):
    """Padding, padding or an id, padding or a small feature."""

    def forward(self, x: Tensor, mask: Tensor, ids: Tensor) -> Tensor:
        z = self.layers[0](x, (mask & (ids != PAD))[:, None])
        z = self.layers[1](z, (mask & (x[..., 0] > 0))[:, None])
        y: Tensor = self.layers[2](z, mask[:, None])
        return y


class PadId(Stack):
    """The mask is what the ids say, with a pad id other than 0; token 0 and the last are pooled."""

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, keep = self.embed(ids), (ids != PAD)[:, None]
        for layer in self.layers:
            x = layer(x, keep)
        return x, x[:, 0].tanh(), x[:, -1]


class Lengths(Stack):
    """Lengths of elements, and a mean over their tokens."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        inside = torch.arange(x.shape[1]) < mask.sum(1, keepdim=True)
        for layer in self.layers:
            x = layer(x, inside[:, None])
        weight = inside.to(x.dtype)[..., None]
        pooled: Tensor = (x * weight).sum(1) / weight.sum(1).clamp(min=1.0)
        return pooled


class Two(Stack):
    """Two inputs with two masks, which attend to each other."""

    def forward(self, x: Tensor, mask: Tensor, y: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        x, y = self.layers[0](x, mask[:, None]), self.layers[0](y, other[:, None])
        return self.layers[1](x, other[:, None], y), self.layers[1](y, mask[:, None], x)


class Joined(Stack):
    """Two inputs with two masks, whose rows are added: what either of them shows is a token."""

    def forward(self, x: Tensor, mask: Tensor, y: Tensor, other: Tensor) -> Tensor:
        z: Tensor = self.layers[0](x, mask[:, None]) + self.layers[1](y, other[:, None])
        return self.layers[0].norm(self.layers[0].out(z))


class CausalNan(Stack):
    """Causal with padding: a row without keys is NaN, and so is all that reads it as a value."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        for layer in self.layers:
            x = layer(x, mask[:, None] & causal)
        weight = mask[..., None].to(x.dtype)
        pooled: Tensor = (x * weight).sum(1)
        return pooled


class Shifted(Stack):
    """A mask, and the same mask one token further."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        later = nn.functional.pad(mask, (1, 0), value=True)[:, :-1]
        y: Tensor = self.layers[1](self.layers[0](x, later[:, None]), mask[:, None])
        return y


class Queries(Stack):
    """Tokens that attend to a memory without a mask."""

    def forward(self, x: Tensor, mask: Tensor, y: Tensor, other: Tensor) -> Tensor:
        x = self.layers[0](x, mask[:, None])
        z: Tensor = self.layers[1](x, None, y) + other[..., None]
        return z


class Several(Stack):
    """Rows before and after, rows of zeros, and two places at once."""

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        first = self.layers[0](x, mask[:, None])
        last = self.layers[1](first, mask[:, None])
        return first, last, last * mask[..., None], first[:, 2] + last[:, -1]


class Flipped(Stack):
    """What both masks hide lies in two orders, of which no slice is made."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.layers[0](x, mask.flip(1)[:, None])
        y: Tensor = self.layers[1](x, mask[:, None])
        return y


class Complement(Stack):
    """Each token is hidden once, and none twice."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        x = self.layers[0](x, (ids == 0)[:, None])
        y: Tensor = self.layers[1](x, (ids != 0)[:, None])
        return y


class Reconstructs(Stack):
    """What the encoder doesn't see is what the decoder is asked for."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.layers[0](x, mask[:, None])
        y: Tensor = self.layers[1](x, None)
        return y


class Convolved(Stack):
    """A convolution reads padding behind the attention that hides it."""

    def __init__(self) -> None:
        super().__init__(1)
        self.near = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.layers[0](x, mask[:, None])
        x = x + self.near(x.mT).mT
        y: Tensor = self.layers[0].out(x)
        return y


def _args(module: nn.Module, seed: int, keep: float = 0.7) -> tuple[Tensor, ...]:
    """Inputs with random masks; by the seed one element is hidden whole, or none is."""
    generator = torch.Generator().manual_seed(seed)

    def numbers() -> Tensor:
        return torch.randn(BATCH, LENGTH, WIDTH, generator=generator)

    def mask() -> Tensor:
        return _mask(seed, torch.rand(BATCH, LENGTH, generator=generator) < keep)

    ids = torch.randint(8, (BATCH, LENGTH), generator=generator)
    match module:
        case PadId():
            return (torch.where(mask(), ids, PAD),)
        case Two() | Joined() | Queries():
            return numbers(), mask(), numbers(), mask()
        case Types() | Three():
            return numbers(), mask(), ids
        case Complement():
            return numbers(), ids % 2
    return numbers(), mask()


def _mask(seed: int, holes: Tensor) -> Tensor:
    """Holes, padding on the right, on the left, an element hidden whole, all and nothing."""
    places = torch.arange(LENGTH)
    lengths = holes.sum(1, keepdim=True)
    match seed % 6:
        case 1:
            return places < lengths
        case 2:
            return places >= LENGTH - lengths
        case 3:
            return holes & (torch.arange(BATCH)[:, None] != 1)
        case 4:
            return torch.zeros_like(holes)
        case 5:
            return torch.ones_like(holes)
    return holes


def _shapes(args: tuple[Tensor, ...]) -> tuple[dict[int, Any], ...]:
    batch, length = Dim("batch", max=64), Dim("length", max=64)
    return tuple({0: batch, 1: length} for _ in args)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "encoder": Encoder,
    "masked mean": MaskedMean,
    "filled maximum": FilledMaximum,
    "memory": lambda: Unmasked(hide=True),
    "causal": Causal,
    "types": Types,
    "types, finite fill": lambda: Types(fill=-1e9),
    "three": lambda: Three(3),
    "pad id": PadId,
    "pad id, finite fill": lambda: PadId(fill=torch.finfo(torch.float32).min),
    "lengths": Lengths,
    "two": Two,
    "joined": Joined,
    "shifted": Shifted,
    "queries": Queries,
    "several": Several,
}


def _pairs(found: Any, expected: Any) -> Iterator[tuple[Tensor, Tensor]]:
    several = isinstance(expected, tuple)
    yield from zip(found, expected, strict=True) if several else [(found, expected)]


@pytest.mark.parametrize("name", MODELS)
def test_what_is_specified_is_eager(name: str) -> None:
    torch.manual_seed(0)
    module = MODELS[name]().eval()
    sample = _args(module, 0)
    optimized = attngraph.optimize(
        module,
        sample,
        dynamic_shapes=None if name == "memory" else _shapes(sample),
        ignore_padded_rows=True,
        verify="off",
    )
    hidden = _hold(module, optimized, optimized.report.passes)
    assert hidden or name == "memory"  # the option leaves something out


@pytest.mark.parametrize("name", ["pad id", "three", "joined", "several"])
def test_what_is_specified_is_eager_over_packed_attention(name: str) -> None:
    """As for a target with kernels for attention over packed rows."""
    torch.manual_seed(0)
    module = MODELS[name]().eval()
    sample = _args(module, 0)
    graph = trace(Model(module, None, sample, {}, _shapes(sample))).graph
    results = run(graph, pipeline(ignore_padded_rows=True, packed_attention=True))
    packs = any(node.op == "attn.packed_attention" for node in graph)
    assert packs == (name != "joined")  # whose attentions hide more than padding
    session = to_session(lower(graph, target=CPU), CPU)
    several = isinstance(module(*sample), tuple)

    def candidate(*args: Tensor) -> Any:
        found = session.run(list(args))
        return tuple(found) if several else found[0]

    assert _hold(module, candidate, results)


def _hold(module: nn.Module, candidate: Callable[..., Any], results: Iterable[PassResult]) -> int:
    """Compares what is specified, under masks of each kind; the number of rows that are not."""
    padding, hidden = Padding(packed_tokens(results)), 0
    for seed in range(12):
        args = _args(module, seed)
        expected = module(*args)  # with gradients: torch's fused layers lose an element's rows
        rows = padding.rows(args)
        for at, (found, eager) in enumerate(_pairs(candidate(*args), expected)):
            valid = rows.get(at, torch.ones(eager.shape[:1], dtype=torch.bool))
            hidden += int((~valid).sum())
            torch.testing.assert_close(
                found[valid], eager[valid], rtol=2e-4, atol=2e-5, equal_nan=True
            )
    return hidden


def _refused(module: nn.Module, *, seed: int = 5) -> str:
    torch.manual_seed(0)
    args = _args(module, seed)
    with pytest.raises(UsageError) as caught:
        attngraph.optimize(
            module.eval(), args, dynamic_shapes=_shapes(args), ignore_padded_rows=True
        )
    return str(caught.value)


def test_masks_that_hide_no_token_together_are_named() -> None:
    said = _refused(Complement())
    assert "no token is hidden by all masks" in said
    assert said.count("the mask of attn.attention at") == 2
    assert said.count("(from ids)") == 2


@pytest.mark.parametrize(
    ("kind", "reader"), [(Reconstructs, r"attn.attention at"), (Convolved, "aten.")]
)
def test_rows_that_are_read_again_are_no_padding(kind: type[Stack], reader: str) -> None:
    said = _refused(kind())
    assert reader in said
    assert "reads their rows there" in said


def test_rows_that_may_be_nan_are_read() -> None:
    """0 · NaN is NaN, so the rows that attend to nothing are values like any other."""
    assert "reads their rows there" in _refused(CausalNan())


def test_a_sample_of_padding_alone_compares_nothing() -> None:
    torch.manual_seed(0)
    module, args = Encoder().eval(), _args(Encoder(), 4)
    with pytest.raises((UsageError, ParityError), match=r"nothing (is|was) compared"):
        attngraph.optimize(module, args, dynamic_shapes=_shapes(args), ignore_padded_rows=True)


def test_an_output_without_valid_rows_in_any_case_is_named() -> None:
    module = PadId().eval()
    shown, hidden = _args(module, 5), _args(module, 4)
    optimized = attngraph.optimize(module, shown, ignore_padded_rows=True, verify="off")
    padding = Padding(packed_tokens(optimized.report.passes))
    names = ["rows", "first", "last"]
    padding.require_rows([hidden, shown], names)
    with pytest.raises(UsageError, match="all of rows is padding, so nothing is compared"):
        padding.require_rows([hidden, hidden], names)


def test_pooled_outputs_are_said_to_be_unspecified() -> None:
    torch.manual_seed(0)
    module = PadId().eval()
    (ids,) = _args(module, 1)
    optimized = attngraph.optimize(module, (ids,), ignore_padded_rows=True, verify="off")
    (note,) = [note for note in optimized.report.notes if "leaves unmasked" in note]
    assert "the rows of the others in output_0" in note
    assert "elements of the batch of which token 0 is masked in output_1" in note
    assert "elements of the batch of which token -1 is masked in output_2" in note


def test_masks_that_no_tensor_joins_are_told() -> None:
    assert "where tokens are hidden can't be computed from the masks" in _refused(Flipped())
