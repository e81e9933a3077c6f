"""Padding is what influences nothing: whatever stands there, all that is read stays the same."""

from __future__ import annotations

import pytest
import torch

from attngraph.analysis.rows.padded_reads import Tokens
from attngraph.analysis.rows.padding import find_tokens
from attngraph.ir import Graph, Value, interpret, parse
from attngraph.ir.clone import clone

B, S, F = 3, 5, 4
HEAD = f"""graph @main {{
  input %x : f32[{B}, {S}, {F}]
  input %m : bool[{B}, {S}]
  input %other : bool[{B}, {S}]
  parameter %w : f32[{F}, {F}]
  %keys = aten.reshape(%m) {{shape = [{B}, 1, 1, {S}]}}
  %more = aten.reshape(%other) {{shape = [{B}, 1, 1, {S}]}}
  %wide = aten.reshape(%m) {{shape = [{B}, {S}, 1]}}
  %number = aten._to_copy(%wide) {{dtype = f32}}
  %p = aten.linear(%x, %w)
  %q = aten.relu(%p)
"""
ATTEND = "attn.attention(%q, %q, %q, none, %keys) {{heads = 2, kv_heads = 2, scale = 0.5{}}}"
GRAPHS = {
    # name: (body, whether the projection is read at padding, the number of other readers)
    "an encoder": (f"%a = {ATTEND.format('')}\n%y = aten.relu(%a)\n  return %y", False, 0),
    "two layers": (
        f"%a = {ATTEND.format('')}\n%b = aten.linear(%a, %w)\n"
        "%y = attn.attention(%b, %b, %b, none, %keys) {heads = 2, kv_heads = 2, scale = 0.5}\n"
        "  return %y", False, 0,
    ),
    "a mean over all": (
        f"%a = {ATTEND.format('')}\n%s = aten.add.Tensor(%a, %q)\n"
        "%y = aten.mean.dim(%s) {dim = [1]}\n  return %y", True, 1,
    ),
    "a sum over tokens": (
        f"%a = {ATTEND.format('')}\n%z = aten.mul.Tensor(%a, %number)\n"
        "%y = aten.sum.dim_IntList(%z) {dim = [1]}\n  return %y", False, 0,
    ),
    "a choice of tokens": (
        f"%a = {ATTEND.format('')}\n%zero = aten.full() {{size = [], fill_value = 0.0, "
        "dtype = f32}\n%z = aten.where.self(%wide, %a, %zero)\n"
        "%y = aten.sum.dim_IntList(%z) {dim = [1]}\n  return %y", False, 0,
    ),
    "the first token": (
        f"%a = {ATTEND.format('')}\n%y = aten.select.int(%a) {{dim = 1, index = 0}}\n"
        "  return %y", False, 0,
    ),
    "rows that average": (
        "%b = attn.attention(%q, %q, %q, none, %keys) {heads = 2, kv_heads = 2, scale = 0.5, "
        'masked_rows = "mean", causal = true}\n%y = aten.relu(%b)\n  return %y', False, 0,
    ),
}  # fmt: skip


def _tokens(body: str) -> tuple[Graph, list[Tokens]]:
    weight = torch.randn(F, F, generator=torch.Generator().manual_seed(5))
    graph = parse(f"{HEAD}  {body}\n}}", {"w": weight})
    return graph, find_tokens(graph)


def _named(graph: Graph, name: str) -> Value:
    return next(value for node in graph for value in node.outputs if value.name == name)


@pytest.mark.parametrize("name", GRAPHS)
def test_who_reads_padding(name: str) -> None:
    body, read, readers = GRAPHS[name]
    graph, (tokens,) = _tokens(body)
    assert tokens.rows == (B, S)
    assert (_named(graph, "p") in tokens.full) == read
    assert len(tokens.readers) == readers


@pytest.mark.parametrize("name", GRAPHS)
def test_what_is_not_read_at_padding_may_be_anything_there(name: str) -> None:
    graph, (tokens,) = _tokens(GRAPHS[name][0])
    draw = torch.Generator().manual_seed(1)
    there = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 1, 1, 0], [1, 1, 1, 1, 1]]).bool()
    given = [torch.randn(B, S, F, generator=draw), there, there]
    unread = [
        value
        for node in graph
        for value in node.outputs
        if value in tokens.linked and value not in tokens.full and value not in graph.outputs
    ]
    for value in unread:
        copy = clone(graph)
        twin = _named(copy, value.name)
        whole = clone(graph)
        whole.set_outputs([_named(whole, value.name), *whole.outputs], ["value", "y"])
        known, before = interpret(whole, given)
        moved = torch.where(there[..., None], known, 9 * torch.randn(known.shape, generator=draw))
        copy.replace_uses(twin, copy.add_input("drawn", twin.type))
        (after,) = interpret(copy, [*given, moved])
        if graph.outputs[0] in tokens.linked:
            before, after = (torch.where(there[..., None], y, 0) for y in (before, after))
        torch.testing.assert_close(after, before)
    assert unread or tokens.readers


def test_what_two_masks_show_is_no_padding() -> None:
    """A token is hidden only where all that read it as a key hide it."""
    second = "attn.attention(%q, %q, %q, none, %more) {heads = 2, kv_heads = 2, scale = 0.5}"
    _, found = _tokens(
        f"%a = {ATTEND.format('')}\n%b = {second}\n%y = aten.add.Tensor(%a, %b)\n  return %y"
    )
    (tokens,) = found
    assert len(tokens.sites) == 2
    assert tokens.shown != tokens.sites[0].shown


def test_without_a_mask_there_is_no_padding() -> None:
    assert _tokens(f"%y = {ATTEND.format('').replace(', none, %keys', '')}\n  return %y")[1] == []


def test_a_token_by_itself_is_named_by_its_place() -> None:
    graph, (tokens,) = _tokens(GRAPHS["the first token"][0])
    assert list(tokens.singles.values()) == [0]
    assert _named(graph, "a") not in tokens.full


@pytest.mark.parametrize("name", ["a sum over tokens", "a choice of tokens"])
def test_what_zeroes_padding_is_pooling(name: str) -> None:
    _, (tokens,) = _tokens(GRAPHS[name][0])
    assert len(tokens.pooling) == 1
