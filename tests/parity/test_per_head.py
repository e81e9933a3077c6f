"""Heads written one by one, in every way we know: one attention, and as many GEMMs as one has.

Each model is checked against eager at its own sizes and two others of its dynamic dims; then the
nodes of the ONNX graph are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

from attngraph.compiler import optimize
from examples import per_head

H, D, M = 4, 6, 24
BATCH, SEQ, MEMORY = Dim("batch", max=64), Dim("seq", max=64), Dim("memory", max=64)


@dataclass(frozen=True)
class Case:
    """A module, its inputs ("x", "memory", "padding"), and what it must become."""

    make: Callable[[], nn.Module]
    inputs: tuple[str, ...]
    attentions: int
    gemms: int


CASES: dict[str, Case] = {}


def case(
    *inputs: str, attentions: int = 1, gemms: int = 2
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    def register(module: type[nn.Module]) -> type[nn.Module]:
        CASES[module.__name__] = Case(module, inputs or ("x",), attentions, gemms)
        return module

    return register


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = query @ key.transpose(-2, -1) * D**-0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ value


def causal(x: Tensor) -> Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()


class Head(nn.Module):
    """Self-attention of one head, causal."""

    def __init__(self, bias: bool = False, depth: int = D) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(M, depth, bias=bias) for _ in range(3))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(-2, -1) * D**-0.5
        scores = scores.masked_fill(~causal(x), float("-inf"))
        return self.dropout(scores.softmax(-1)) @ self.value(x)


class Heads(nn.Module):
    """H heads and an output projection."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head(bias) for _ in range(H))
        self.out = nn.Linear(M, M)


@case()
class Listed(Heads):
    """A ModuleList, concatenated."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([head(x) for head in self.heads], dim=-1))


@case()
class Stacked(Heads):
    """Stacked on an axis of their own, then flattened."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.stack([head(x) for head in self.heads], dim=2).flatten(2))


@case()
class StackedFirst(Heads):
    """Stacked in front, permuted and flattened."""

    def forward(self, x: Tensor) -> Tensor:
        stacked = torch.stack([head(x) for head in self.heads])
        return self.out(stacked.permute(1, 2, 0, 3).flatten(2))


@case()
class Assigned(Heads):
    """Written into slices of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros(x.shape)
        for h, head in enumerate(self.heads):
            out[..., h * D : (h + 1) * D] = head(x)
        return self.out(out)


@case()
class AssignedHeads(Heads):
    """Written into an axis of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty(x.shape[0], x.shape[1], H, D)
        for h, head in enumerate(self.heads):
            out[:, :, h] = head(x)
        return self.out(out.flatten(2))


class Projected(Heads):
    """Each head has its own output projection."""

    def __init__(self) -> None:
        super().__init__(bias=True)
        self.outs = nn.ModuleList(nn.Linear(D, M) for _ in range(H))
        self.out = nn.Identity()

    def terms(self, x: Tensor) -> list[Tensor]:
        return [out(head(x)) for head, out in zip(self.heads, self.outs, strict=True)]


@case()
class Summed(Projected):
    """Python's sum."""

    def forward(self, x: Tensor) -> Tensor:
        return x + sum(self.terms(x))


@case()
class SummedInPlace(Projected):
    """+= in a loop, onto zeros."""

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for term in self.terms(x):
            total += term
        return total


@case()
class SummedStack(Projected):
    """The sum over a stack."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack(self.terms(x)).sum(0)


@case()
class AveragedStack(Projected):
    """The mean over a stack."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack(self.terms(x), dim=-1).mean(-1)


@case(gemms=1)
class AveragedHeads(Heads):
    """The mean of the heads' contexts (Graph attention's last layer)."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([head(x) for head in self.heads]).mean(0)


class Parameters(nn.Module):
    """Stacked weights: (H, M, D) for queries, keys and values, (H, D, M) for the output."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (
            nn.Parameter(torch.randn(H, M, D) / M**0.5) for _ in range(3)
        )
        self.out = nn.Parameter(torch.randn(H, D, M) / M**0.5)


@case()
class LoopOverParameters(Parameters):
    """x @ W[h]."""

    def forward(self, x: Tensor) -> Tensor:
        contexts = [attend(x @ self.query[h], x @ self.key[h], x @ self.value[h]) for h in range(H)]
        return torch.cat(contexts, -1) @ self.out.flatten(0, 1)


@case()
class EinsumPerHead(Parameters):
    """An einsum per head, output projections summed."""

    def forward(self, x: Tensor) -> Tensor:
        total = 0
        for a, b, c, o in zip(self.query, self.key, self.value, self.out, strict=True):
            q, k, v = (torch.einsum("bsm,md->bsd", x, w) for w in (a, b, c))
            weights = torch.einsum("bsd,btd->bst", q, k).mul(D**-0.5).softmax(-1)
            context = torch.einsum("bst,btd->bsd", weights, v)
            total = total + torch.einsum("bsd,dm->bsm", context, o)
        return total


class Packed(nn.Module):
    """Projections of all heads, used head by head."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(M, M) for _ in range(4))


@case()
class SlicesOfPacked(Packed):
    """Slices of the features."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        cuts = [slice(h * D, (h + 1) * D) for h in range(H)]
        return self.out(torch.cat([attend(q[..., c], k[..., c], v[..., c]) for c in cuts], -1))


@case()
class ChunksOfPacked(Packed):
    """chunk."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).chunk(H, dim=-1) for f in (self.query, self.key, self.value))
        return self.out(torch.cat([attend(*qkv) for qkv in zip(q, k, v, strict=True)], dim=2))


@case()
class SelectsOfPacked(Packed):
    """Selects of a view with heads, stacked on the head axis again."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (H, D)).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        contexts = [attend(q[:, h], k[:, h], v[:, h]) for h in range(H)]
        return self.out(torch.stack(contexts, 1).transpose(1, 2).flatten(2))


@case()
class SlicesOfOneWeight(nn.Module):
    """One packed (M → H · 3 · D): each head has its query, key and value side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(M, 3 * M), nn.Linear(M, M)

    def forward(self, x: Tensor) -> Tensor:
        packed = self.qkv(x).split(D, dim=-1)
        contexts = [attend(*packed[3 * h : 3 * h + 3]) for h in range(H)]
        return self.out(torch.cat(contexts, -1))


@case()
class PackedInThirds(nn.Module):
    """One packed (M → 3 · H · D)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(M, 3 * M), nn.Linear(M, M)

    def forward(self, x: Tensor) -> Tensor:
        packed = self.qkv(x).split(D, dim=-1)
        contexts = [attend(*packed[h::H]) for h in range(H)]
        return self.out(torch.cat(contexts, -1))


@case()
class MultiQuery(nn.Module):
    """One key and value for all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.ModuleList(nn.Linear(M, D) for _ in range(H))
        self.key, self.value, self.out = nn.Linear(M, D), nn.Linear(M, D), nn.Linear(M, M)

    def forward(self, x: Tensor) -> Tensor:
        contexts = [attend(query(x), self.key(x), self.value(x)) for query in self.queries]
        return self.out(torch.cat(contexts, -1))


@case()
class GroupedQuery(nn.Module):
    """Two heads to a key."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.ModuleList(nn.Linear(M, D) for _ in range(H))
        self.keys = nn.ModuleList(nn.Linear(M, D) for _ in range(H // 2))
        self.values = nn.ModuleList(nn.Linear(M, D) for _ in range(H // 2))
        self.out = nn.Linear(M, M)

    def forward(self, x: Tensor) -> Tensor:
        contexts = []
        for h, query in enumerate(self.queries):
            key, value = self.keys[h // 2](x), self.values[h // 2](x)
            contexts.append(attend(query(x), key, value, causal(x)))
        return self.out(torch.cat(contexts, -1))


@case()
class SharedValues(nn.Module):
    """Keys of each head's own, one value."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.ModuleList(nn.Linear(M, D) for _ in range(H))
        self.keys = nn.ModuleList(nn.Linear(M, D) for _ in range(H))
        self.value, self.out = nn.Linear(M, D), nn.Linear(M, M)

    def forward(self, x: Tensor) -> Tensor:
        value = self.value(x)
        pairs = zip(self.queries, self.keys, strict=True)
        return self.out(torch.cat([attend(q(x), k(x), value) for q, k in pairs], -1))


@case("x", "memory", "padding", gemms=3)
class Cross(Packed):
    """Cross-attention with a padding mask, one head after another."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys, self.values = (
            nn.ModuleList(nn.Linear(M, D) for _ in range(H)) for _ in range(3)
        )
        self.query = self.key = self.value = nn.Identity()

    def forward(self, x: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        contexts = [
            attend(q(x), k(memory), v(memory), padding[:, None])
            for q, k, v in zip(self.queries, self.keys, self.values, strict=True)
        ]
        return self.out(torch.cat(contexts, -1))


@case()
class Alibi(Heads):
    """A slope per head."""

    def forward(self, x: Tensor) -> Tensor:
        position = torch.arange(x.shape[1])
        distance = (position[None, :] - position[:, None]).to(x.dtype)
        contexts = []
        for h, head in enumerate(self.heads):
            scores = head.query(x) @ head.key(x).transpose(-2, -1) * D**-0.5
            scores = scores - 2.0 ** -(h + 1) * distance.abs()
            contexts.append(scores.softmax(-1) @ head.value(x))
        return self.out(torch.cat(contexts, -1))


@case()
class LearnedBias(Heads):
    """A table of relative positions per head."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ParameterList(torch.randn(127) for _ in range(H))

    def forward(self, x: Tensor) -> Tensor:
        position = torch.arange(x.shape[1])
        relative = position[None, :] - position[:, None] + 63
        contexts = []
        for head, table in zip(self.heads, self.tables, strict=True):
            scores = head.query(x) @ head.key(x).transpose(-2, -1) * D**-0.5
            contexts.append((scores + table[relative]).softmax(-1) @ head.value(x))
        return self.out(torch.cat(contexts, -1))


@case()
class Temperatures(Heads):
    """A scale per head."""

    def forward(self, x: Tensor) -> Tensor:
        contexts = [
            (head.query(x) @ head.key(x).mT * (0.2 + 0.1 * h)).softmax(-1) @ head.value(x)
            for h, head in enumerate(self.heads)
        ]
        return self.out(torch.cat(contexts, -1))


@case(attentions=2)
class Windows(Heads):
    """Half of the heads are causal: two attentions of two heads."""

    def forward(self, x: Tensor) -> Tensor:
        contexts = []
        for h, head in enumerate(self.heads):
            mask = causal(x) if h < 2 else None
            contexts.append(attend(head.query(x), head.key(x), head.value(x), mask))
        return self.out(torch.cat(contexts, -1))


def rotate(x: Tensor) -> Tensor:
    position = torch.arange(x.shape[1], dtype=x.dtype)[:, None]
    angle = position * 10000.0 ** (-torch.arange(0, D, 2) / D)
    angle = torch.cat([angle, angle], -1)
    first, second = x.chunk(2, -1)
    return x * angle.cos() + torch.cat([-second, first], -1) * angle.sin()


@case()
class Rotary(Heads):
    """Rotary embeddings within each head."""

    def forward(self, x: Tensor) -> Tensor:
        contexts = [
            attend(rotate(head.query(x)), rotate(head.key(x)), head.value(x), causal(x))
            for head in self.heads
        ]
        return self.out(torch.cat(contexts, -1))


@case()
class NormedAndGated(Heads):
    """Norms of queries and keys with weights of each head's own, and a gate on each context."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(H))
        self.gates = nn.ParameterList(torch.randn(D) for _ in range(H))
        for norm in self.norms:
            nn.init.normal_(norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        contexts = [
            attend(norm(head.query(x)), head.key(x), head.value(x)) * gate.sigmoid()
            for head, norm, gate in zip(self.heads, self.norms, self.gates, strict=True)
        ]
        return self.out(torch.cat(contexts, -1))


@case()
class Sdpa(Heads):
    """torch's own attention on (B, 1, S, D)."""

    def forward(self, x: Tensor) -> Tensor:
        contexts = []
        for head in self.heads:
            q, k, v = (f(x)[:, None] for f in (head.query, head.key, head.value))
            contexts.append(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return self.out(torch.cat(contexts, 1).transpose(1, 2).flatten(2))


@case()
class WeightsReturned(Heads):
    """The weights of all heads are returned, stacked."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        contexts, weights = [], []
        for head in self.heads:
            probabilities = (head.query(x) @ head.key(x).mT * D**-0.5).softmax(-1)
            weights.append(probabilities)
            contexts.append(probabilities @ head.value(x))
        return self.out(torch.cat(contexts, -1)), torch.stack(weights, 1)


@case()
class ContextReturned(Heads):
    """One head's context is returned as well."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        contexts = [head(x) for head in self.heads]
        return self.out(torch.cat(contexts, -1)), contexts[1]


@case(gemms=5)
class ChunkedInputs(nn.Module):
    """Each head sees its share of the features: the queries, keys, values stay H products each."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(D, 3 * D) for _ in range(H))
        self.out = nn.Linear(M, M)

    def forward(self, x: Tensor) -> Tensor:
        contexts = []
        for part, projection in zip(x.chunk(H, -1), self.projections, strict=True):
            contexts.append(attend(*projection(part).chunk(3, -1)))
        return self.out(torch.cat(contexts, -1))


@case()
class SharedByChunks(nn.Module):
    """The same small projections for each share of the features."""

    def __init__(self) -> None:
        super().__init__()
        self.projection, self.out = nn.Linear(D, 3 * D), nn.Linear(M, M)

    def forward(self, x: Tensor) -> Tensor:
        contexts = [attend(*self.projection(part).chunk(3, -1)) for part in x.split(D, -1)]
        return self.out(torch.cat(contexts, -1))


@case(attentions=2)
class TwoSizes(nn.Module):
    """Heads of two sizes: grouped by size."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head(depth=depth) for depth in (4, 4, 8, 8))
        self.out = nn.Linear(M, M)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([head(x) for head in self.heads], -1))


def _example(case: Case) -> tuple[nn.Module, tuple[Tensor, ...], tuple[dict[int, Dim], ...]]:
    torch.manual_seed(0)
    padding = torch.ones(2, 7, dtype=torch.bool)
    padding[0, :2] = False
    padding[1, 4] = False
    args = {"x": torch.randn(2, 5, M), "memory": torch.randn(2, 7, M), "padding": padding}
    dims = {"x": {0: BATCH, 1: SEQ}, "memory": {0: BATCH, 1: MEMORY}}
    dims["padding"] = dims["memory"]
    shapes = tuple(dims[name] for name in case.inputs)
    return case.make().eval(), tuple(args[name] for name in case.inputs), shapes


def _attentions(counts: Counter[str]) -> int:
    """Attention, GroupQueryAttention, MultiHeadAttention or primitives: whichever is chosen."""
    return sum(number for op, number in counts.items() if op.endswith(("Attention", "Softmax")))


@pytest.mark.parametrize("name", CASES)
def test_heads_merge(name: str) -> None:
    case = CASES[name]
    module, args, shapes = _example(case)
    optimized = optimize(module, args, dynamic_shapes=shapes, verify="final")
    parity = optimized.report.parity
    assert parity is not None
    assert parity.passed, str(parity)
    counts = Counter(node.op_type for node in optimized.model.graph)
    products = 2 * counts["Softmax"]  # an attention of primitives has two of its own
    found = _attentions(counts), counts["MatMul"] + counts["Gemm"] - products
    assert found == (case.attentions, case.gemms), counts


@pytest.mark.parametrize("summed", [False, True], ids=["concatenated", "summed"])
def test_the_example_has_one_attention_and_two_gemms_per_layer(
    summed: bool, tmp_path: Path
) -> None:
    module, args, shapes = per_head.build(summed)
    optimized = optimize(module, args, dynamic_shapes=shapes, verify="final")
    optimized.save(tmp_path / "model.onnx")
    assert optimized.report.parity is not None
    assert optimized.report.parity.passed, str(optimized.report.parity)
    layers = len(module.attentions)
    assert optimized.report.fused == 12 * layers
    assert {site.merged for site in optimized.report.sites} == {
        "12 attentions are one of 12 heads."
    }
    nodes = onnx.load(tmp_path / "model.onnx").graph.node
    counts = Counter(node.op_type for node in nodes)
    assert _attentions(counts) == layers
    assert counts["MatMul"] + counts["Gemm"] == 2 * layers, counts
