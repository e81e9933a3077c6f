"""Every form of an attention gives what the reference gives, wherever the table allows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import pytest

from attngraph.export.kernels import Choice, Form, facts_of
from attngraph.export.kernels.choice import candidates
from attngraph.export.kernels.table import (
    ATTENTION,
    BLOCKS,
    GROUPED,
    MASKED,
    MULTI_HEAD,
    PADDED,
    PRIMITIVE,
)
from attngraph.export.lowering.lower import lower
from attngraph.export.target import Target
from attngraph.ir import Graph, interpret
from tests.export.lowered import assert_same, graph_of, random_inputs, run, session_of
from tests.export.lowering.test_attention import hostile
from tests.variants import some_wide

LENGTHS = (1, 2, 7, 8, 9, 15, 63)
"""Around the number of blocks and its multiples."""


def site(
    *operands: str,
    queries: Any = "seq",
    keys: Any = "seq",
    heads: int = 4,
    groups: int = 4,
    size: int = 8,
    values: int = 0,
    dtype: str = "f32",
    attrs: str = "",
    weights: bool = False,
) -> Graph:
    """One attention; `operands` are masks and biases as "m: bool[…]" and "b: f32[…]"."""
    values = values or size
    body = f"  input %q : {dtype}[batch, {queries}, {heads * size}]\n"
    body += f"  input %k : {dtype}[batch, {keys}, {groups * size}]\n"
    body += f"  input %v : {dtype}[batch, {keys}, {groups * values}]\n"
    body += "".join(f"  input %{operand}\n" for operand in operands)
    names = {operand[0] for operand in operands}
    inputs = f"%q, %k, %v, {'%b' if 'b' in names else 'none'}, {'%m' if 'm' in names else 'none'}"
    written = f"heads = {heads}, kv_heads = {groups}, scale = 0.4{attrs}"
    made, types = "%y", f"{dtype}[batch, {queries}, {heads * values}]"
    if weights:
        made, written = "%y, %w", f"{written}, weights = true"
        types += f", {dtype}[batch, {heads}, {queries}, {keys}]"
    return graph_of(
        f"{body}  {made} = attn.attention({inputs}) {{{written}}} : {types}\n  return {made}"
    )


def written(graph: Graph, form: Form, *, start: int = 0, below: Form | None = None) -> ir.Model:
    (node,) = graph
    return lower(graph, kernels={node: Choice(form, "any", start, below)})


def check(graph: Graph, model: ir.Model, lengths: Sequence[int]) -> None:
    session = session_of(model)
    for length in lengths:
        sizes = {"batch": 2, "seq": length, "keys": length + 3}
        inputs = [
            hostile(tensor) if value.name in "mb" else tensor
            for value, tensor in zip(graph.inputs, random_inputs(graph, sizes), strict=True)
        ]
        for actual, wanted in zip(run(session, inputs), interpret(graph, inputs), strict=True):
            assert_same(actual, wanted, f"length {length}")


CAUSAL = ", causal = true"
CAUSALS = {
    "plain": site(attrs=CAUSAL),
    "grouped": site(attrs=CAUSAL, groups=2),
    "capped": site(attrs=f"{CAUSAL}, softcap = 1.5"),
    "fewer queries": site(attrs=CAUSAL, keys="keys"),
    "fewer keys": site(attrs=CAUSAL, queries="keys"),
    "padding": site("m : bool[batch, 1, 1, seq]", attrs=CAUSAL),
    "mask": site("m : bool[batch, 4, seq, seq]", attrs=CAUSAL),
    "nan rows": site("m : bool[seq, seq]", attrs=f'{CAUSAL}, masked_rows = "nan"'),
    "bias": site("b : f32[4, seq, seq]", attrs=CAUSAL),
    "bias and mask": site("b : f32[1, seq]", "m : bool[batch, 1, seq, seq]", attrs=CAUSAL),
    "wide values": site(attrs=CAUSAL, values=10),
}


@pytest.mark.parametrize("form", [MASKED, PRIMITIVE], ids=lambda form: form.name)
@pytest.mark.parametrize("name", CAUSALS)
def test_causal_at_any_length(name: str, form: Form) -> None:
    check(CAUSALS[name], written(CAUSALS[name], form), LENGTHS)


@pytest.mark.parametrize("form", BLOCKS, ids=lambda form: form.name)
@pytest.mark.parametrize("name", some_wide(CAUSALS))
def test_blocks_above_a_length_and_one_mask_below_it(name: str, form: Form) -> None:
    model = written(CAUSALS[name], form, start=form.blocks**2, below=MASKED)
    at = form.blocks**2
    check(CAUSALS[name], model, (1, 2, 9, at - 1, at, at + 1, at + 7))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("form", BLOCKS, ids=lambda form: form.name)
def test_blocks_of_a_static_length(form: Form, length: int) -> None:
    for operands in ((), (f"m : bool[batch, 1, {length}, {length}]",)):
        graph = site(*operands, queries=length, keys=length, attrs=CAUSAL)
        check(graph, written(graph, form), (length,))


def test_layers_share_what_the_blocks_need() -> None:
    body = "  input %q : f32[batch, seq, 32]\n"
    for layer in range(3):
        query = f"%r{layer - 1}" if layer else "%q"
        body += f"  %r{layer} = attn.attention({query}, %q, %q)"
        body += " {heads = 4, kv_heads = 4, scale = 0.5, causal = true} : f32[batch, seq, 32]\n"
    graph = graph_of(f"{body}  return %r2")
    choice = Choice(BLOCKS[-1], "any", 64, MASKED)
    model = lower(graph, kernels=dict.fromkeys(graph, choice))
    ops = [node.op_type for node in model.graph]
    assert ops.count("If") == 3
    assert ops.count("LessOrEqual") == 1
    assert len(ops) - 3 <= 6  # a short call computes one mask and asks for the length
    (first, *_) = (node for node in model.graph if node.op_type == "If")
    inside = Counter(node.op_type for node in first.attributes["then_branch"].as_graph())
    assert inside["Attention"] == 8
    assert inside["Slice"] == 7 * 3  # keys, values and the mask; the last block sees all of them
    assert inside.total() <= 8 + 21 + 12
    check(graph, model, (5, 64, 100))


@pytest.mark.parametrize("extra", ["", ", softcap = 1.5"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_grouped_query_attention(groups: int, extra: str) -> None:
    graph = site(attrs=f"{CAUSAL}{extra}", groups=groups)
    model = written(graph, GROUPED)
    assert model.graph.opset_imports["com.microsoft"] == 1
    check(graph, model, LENGTHS)


@pytest.mark.parametrize("values", [8, 12])
@pytest.mark.parametrize("size", [6, 8])
def test_multi_head_attention(size: int, values: int) -> None:
    for keys in ("seq", "keys"):
        graph = site(keys=keys, size=size, values=values)
        check(graph, written(graph, MULTI_HEAD), LENGTHS)


def test_an_operator_inside_a_branch_brings_its_opset() -> None:
    graph = site()
    model = written(graph, MULTI_HEAD, start=8, below=ATTENTION)
    assert model.graph.opset_imports["com.microsoft"] == 1
    check(graph, model, (7, 8))


@pytest.mark.parametrize(("size", "values"), [(6, 6), (6, 8), (8, 5), (12, 20)])
@pytest.mark.parametrize("groups", [2, 4])
def test_padded_heads(groups: int, size: int, values: int) -> None:
    for attrs in ("", CAUSAL):
        graph = site(
            "m : bool[batch, 1, seq, seq]", groups=groups, size=size, values=values, attrs=attrs
        )
        model = written(graph, PADDED)
        (node,) = (node for node in model.graph if node.op_type == "Attention")
        assert node.attributes["scale"].as_float() == pytest.approx(0.4)
        check(graph, model, (1, 9))


@pytest.mark.parametrize("policy", ["zero", "mean", "nan"])
@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (1, 1)])
def test_primitives(heads: int, groups: int, dtype: str, policy: str) -> None:
    """Of hostile masks, which hide all keys of some rows; one head has no axis of its own."""
    operands = "m : bool[batch, 1, seq, keys]", f"b : {dtype}[{heads}, 1, keys]"
    form = {"heads": heads, "groups": groups, "keys": "keys", "dtype": dtype, "weights": True}
    for attrs in ("", f"{CAUSAL}, softcap = 2.0"):
        policed = f'{attrs}, masked_rows = "{policy}"'
        graph = site(*operands, attrs=policed, **form)  # type: ignore[arg-type]
        model = written(graph, PRIMITIVE)
        assert not [node for node in model.graph if node.op_type == "Attention"]
        check(graph, model, (1, 6))


@pytest.mark.parametrize("name", CAUSALS)
def test_whatever_the_table_allows_on_the_cpu_runs(name: str) -> None:
    graph = CAUSALS[name]
    (node,) = graph
    found = candidates(facts_of(node, graph.dims), Target("cpu"), (1, 31))
    legal = [candidate.form for candidate in found if not candidate.refused]
    assert ATTENTION in legal
    for form in legal:
        start, below = (form.blocks**2, MASKED) if form.blocks > 1 else (0, None)
        check(graph, written(graph, form, start=start, below=below), (1, 70))


def test_grouped_heads_of_another_size_are_refused() -> None:
    """onnxruntime's kernel rejects head sizes that are no multiple of 8, so the table must."""
    graph = site(attrs=CAUSAL, size=6)
    (node,) = graph
    found = candidates(facts_of(node, graph.dims), Target("cpu"), (1, 31))
    refused = {candidate.form: candidate.refused for candidate in found}
    assert refused[GROUPED] == "it runs only where D % 8 = 0"
    with pytest.raises(Exception, match="multiple of 8"):
        check(graph, written(graph, GROUPED), (4,))


def test_half_precision_forms() -> None:
    for form in (ATTENTION, PADDED, PRIMITIVE):
        graph = site(size=6, dtype="f16", attrs=CAUSAL)
        check(graph, written(graph, form), (1, 9))
