"""Outliers that move into weights: the same function, and less of it lost to rounding."""

from __future__ import annotations

import pytest
import torch

from attngraph.export.precision.quantize import Rounding, quantise
from attngraph.export.precision.smooth import exponents, move, sites
from attngraph.ir import Graph, clone, interpret
from tests.export.lowered import graph_of

WIDTH = 64
ROUNDING = Rounding("int8", narrow=False, keep=frozenset("utqkv"))  # not what reads x
NORM = "%n = aten.layer_norm(%x, %g, %b) {normalized_shape = [64], eps = 1e-5} : f32[rows, 64]"
LINEAR = "%{} = aten.linear(%{}, %w{}, %c{}) : f32[rows, 64]"


def linear(result: str, source: str) -> str:
    return LINEAR.format(result, source, result, result)


MOVED = {
    "norm": [NORM, linear("y", "n"), linear("z", "n"), "return %y, %z"],
    "norm without weights": [
        "%n = attn.rms_norm(%x) {eps = 1e-6} : f32[rows, 64]",
        linear("y", "n"),
        "return %y",
    ],
    "gate": [
        linear("u", "x"),
        linear("t", "x"),
        "%s = aten.sigmoid(%t) : f32[rows, 64]",
        "%h = aten.mul.Tensor(%s, %u) : f32[rows, 64]",
        linear("y", "h"),
        "return %y",
    ],
    "relu": [
        linear("u", "x"),
        "%h = aten.relu(%u) : f32[rows, 64]",
        linear("y", "h"),
        "return %y",
    ],
}
STAY = {
    "an activation between": [
        linear("u", "x"),
        "%h = aten.gelu(%u) : f32[rows, 64]",
        linear("y", "h"),
        "return %y",
    ],
    "another reader": [NORM, linear("y", "n"), "%z = aten.add.Tensor(%n, %y)", "return %z"],
    "an output": [NORM, linear("y", "n"), "return %y, %n"],
    "one weight twice": [
        NORM,
        linear("y", "n"),
        "%z = aten.linear(%x, %wy, %cy) : f32[rows, 64]",
        "return %y, %z",
    ],
    "an input": [linear("y", "x"), "return %y"],
    "a row for all": [
        linear("u", "x"),
        "%m = aten.mean.dim(%u) {dim = [0], keepdim = true} : f32[1, 64]",
        "%h = aten.mul.Tensor(%x, %m) : f32[rows, 64]",
        linear("y", "h"),
        "return %y",
    ],
    "the source read twice": [
        linear("u", "x"),
        "%h = aten.mul.Tensor(%u, %u) : f32[rows, 64]",
        linear("y", "h"),
        "return %y",
    ],
}


def build(lines: list[str]) -> Graph:
    drawn = torch.Generator().manual_seed(3)
    body, weights = "  input %x : f32[rows, 64]\n", {}
    for name in ("g", "b", *(f"{kind}{value}" for kind in "wc" for value in "yzut")):
        if any(f"%{name}," in line or f"%{name})" in line for line in lines):
            shape = [64, 64] if name[0] == "w" else [64]
            weights[name] = torch.randn(*shape, generator=drawn)
            body += f"  parameter %{name} : f32{shape}\n"
    if "g" in weights:
        weights["g"][::9] *= 40  # what makes outliers
    if "wu" in weights:
        weights["wu"][::9] *= 40
    return graph_of(body + "".join(f"  {line}\n" for line in lines), weights)


def drawn(*shape: int) -> torch.Tensor:
    """With outliers, of which a norm leaves some."""
    x = torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(5))
    x[..., 5] *= 60
    return x


def error(graph: Graph, exact: tuple[torch.Tensor, ...], x: torch.Tensor) -> float:
    quantise(graph, "int8", ROUNDING)
    (found, *_), (wanted, *_) = interpret(graph, [x]), exact
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", MOVED)
def test_a_moved_model_computes_the_same_bits_and_loses_less(name: str) -> None:
    graph, x = build(MOVED[name]), drawn(50)
    moves = exponents(graph, [[drawn(20)]])
    moved = clone(graph)
    assert move(moved, moves) == len(moves) >= 1
    wide, fine = x.double(), {name: v.data.double() for name, v in graph.constants.items()}
    exact = interpret(graph, [wide], constants=fine)
    moved_fine = {name: v.data.double() for name, v in moved.constants.items()}
    for a, b in zip(exact, interpret(moved, [wide], constants=moved_fine), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(interpret(graph, [x]), interpret(moved, [x]), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=float(a.abs().max()) * 2**-20)
    assert error(moved, exact, x) < 0.9 * error(graph, exact, x)


def attending(body: str, weights: dict[str, torch.Tensor], *, past: bool = False) -> Graph:
    kinds = {name: f"f32{list(data.shape)}" for name, data in weights.items()}
    given = "".join(f"  parameter %{name} : {kind}\n" for name, kind in kinds.items())
    lines = "  input %x : f32[1, seq, 64]\n" + given
    lines += "  %q = aten.linear(%x, %wq) : f32[1, seq, 64]\n"
    lines += "  %k = aten.linear(%x, %wk) : f32[1, seq, 32]\n"
    lines += "  %v = aten.linear(%x, %wv, %bv) : f32[1, seq, 32]\n"
    return graph_of(lines + body, weights)


@pytest.mark.parametrize("extra", ["", ", causal = true", ', masked_rows = "mean"'])
def test_values_of_grouped_heads_move_into_the_output_projection(extra: str) -> None:
    drawing = torch.Generator().manual_seed(1)
    shapes = {"wq": (64, 64), "wk": (32, 64), "wv": (32, 64), "bv": (32,), "wo": (64, 64)}
    weights = {name: torch.randn(shape, generator=drawing) / 8 for name, shape in shapes.items()}
    weights["wv"][3] *= 50
    attention = f"attn.attention(%q, %k, %v) {{heads = 4, kv_heads = 2, scale = 0.25{extra}}}"
    graph = attending(
        f"  %a = {attention} : f32[1, seq, 64]\n"
        "  %y = aten.linear(%a, %wo) : f32[1, seq, 64]\n  return %y",
        weights,
    )
    x = drawn(1, 30)
    (site,) = (site for site in sites(graph) if site.value.name == "a")
    assert site.source.output.name == "v"
    moved = clone(graph)
    assert move(moved, exponents(graph, [[x]])) == 1
    exact = interpret(graph, [x])
    torch.testing.assert_close(interpret(moved, [x]), exact, rtol=0, atol=1e-4)
    wide = tuple(each.double() for each in exact)
    assert error(moved, wide, x) < error(graph, wide, x)


def test_a_weight_that_would_leave_its_range_stays() -> None:
    graph = build(MOVED["norm"])
    name = next(iter(exponents(graph, [[drawn(50)]])))
    weight = graph.constants["wy"]
    assert weight.data is not None
    for extreme, letter in ((3e38, "y"), (1e-37, "a")):
        weight.data[:] = extreme
        assert not move(graph, {name: letter * WIDTH})


@pytest.mark.parametrize("name", STAY)
def test_what_is_not_such_a_product_stays(name: str) -> None:
    graph = build(STAY[name])
    assert not list(sites(graph))
    assert not exponents(graph, [[drawn(50)]])
