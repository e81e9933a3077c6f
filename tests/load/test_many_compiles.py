"""A process that compiles many models: nothing of this package is left of one, or it is bounded."""

from __future__ import annotations

import functools
import gc
import linecache
import sys
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import graph_module
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import attngraph
from attngraph.frontend.rewording import memoised
from attngraph.ir import Graph, Node, infer

pytestmark = pytest.mark.wide

COMPILES = 60
_WARM = 40  # by then caches of fixed size have filled with what every compile asks for
_BOUNDED = frozenset(["attngraph.ir.infer._SHARED"])  # the oldest go when it is full


class Attention(nn.Module):
    """Of any width, with or without a mask, so that no compile repeats the one before."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        scores = (q @ k.mT).masked_fill(~keep[:, None, None], -torch.inf)
        out: Tensor = self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return out


def compile_one(place: int) -> weakref.ref[nn.Module]:
    """A model that no other place has: its sizes, its dims' names and its ranges are its own."""
    heads = 1 + place % 3
    width = heads * (4 + place // 3 % 29)
    length = 3 + place % 17
    batch, seq = torch.export.Dim(f"b{place}", max=9), torch.export.Dim(f"s{place}", max=64 + place)
    module = Attention(heads, width).requires_grad_(False)
    x, keep = torch.randn(2, length, width), torch.ones(2, length, dtype=torch.bool)
    shapes = ({0: batch, 1: seq}, {0: batch, 1: seq})
    attngraph.optimize(module, (x, keep), dynamic_shapes=shapes)
    return weakref.ref(module)


def sizes() -> dict[str, int]:
    """How much each container of this package's modules, and each cache, holds."""
    found: dict[str, int] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "attngraph":
            continue
        for label, value in vars(module).items():
            if isinstance(value, functools._lru_cache_wrapper):
                info = value.cache_info()
                found[f"{name}.{label}"] = info.currsize if info.maxsize is None else 0
            elif isinstance(value, (dict, list, set)) and not label.startswith("__"):
                found[f"{name}.{label}"] = len(value)
    return found


def alive() -> dict[str, int]:
    """Graphs and nodes that something still holds."""
    gc.collect()
    kinds = {"graphs": Graph, "nodes": Node}
    each = gc.get_objects()
    types = [type(one) for one in each]  # isinstance asks objects, of which torch warns of one
    return {name: sum(issubclass(one, kind) for one in types) for name, kind in kinds.items()}


def grown(count: int) -> Iterator[str]:
    """What grew from compile to compile, of `count` that follow those that fill caches."""
    for place in range(_WARM):
        compile_one(place)
    before, held = sizes(), alive()
    modules = [compile_one(place) for place in range(_WARM, _WARM + count)]
    left = alive()
    for name, size in sizes().items():
        if size > before.get(name, 0) and name not in _BOUNDED:
            yield f"{name}: {before.get(name, 0)} to {size}"
    for name, amount in left.items():
        if amount > held[name]:
            yield f"{name}: {held[name]} to {amount}"
    if kept := sum(module() is not None for module in modules):
        yield f"{kept} modules"


@pytest.mark.slow
def test_many_compiles_leave_nothing_behind() -> None:
    assert list(grown(COMPILES)) == []


def test_torch_keeps_no_results_of_a_trace() -> None:
    """They are of symbolic sizes that no other trace has: half of what a compile left behind."""
    compile_one(0)
    before = len(FakeTensorMode.cache)
    compile_one(1)
    assert len(FakeTensorMode.cache) == before


def test_torch_keeps_no_symbols_of_a_trace() -> None:
    """In a circle through C++ they held all that a trace had found of sizes, and its samples."""
    with memoised._seen(ShapeEnv) as made:
        compile_one(0)
        assert made
        compile_one(1)
        last = [weakref.ref(each) for each in made]
    compile_one(2)
    gc.collect()
    assert not [each for each in last if each() is not None]


def test_torch_keeps_the_sources_of_the_last_traces_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memoised, "_SOURCES", 3)
    compile_one(0)
    before = len(graph_module._loader.eval_cache), len(linecache.cache)
    compile_one(1)
    after = len(graph_module._loader.eval_cache), len(linecache.cache)
    assert after == before


def test_types_that_compiles_share_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a thousand models they were 11 MiB: 16,384 of them fitted."""
    monkeypatch.setattr(infer, "_SHARED", {})
    monkeypatch.setattr(infer, "_SHARED_MOST", 8)
    for place in range(3):
        compile_one(place)
        assert 4 <= len(infer._SHARED) <= 8


def test_what_grows_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measure sees a container and a cache without bounds."""
    kept: list[int] = []
    cache = functools.cache(lambda place: place)
    monkeypatch.setattr(attngraph, "_kept", kept, raising=False)
    monkeypatch.setattr(attngraph, "_cache", cache, raising=False)
    before = sizes()
    kept.append(1)
    cache(1)
    after = sizes()
    assert {name for name in after if after[name] > before[name]} == {
        "attngraph._kept",
        "attngraph._cache",
    }
