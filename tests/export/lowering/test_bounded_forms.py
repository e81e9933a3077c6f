"""Windows, lengths, sinks and what stands before an attention, in every form that takes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from attngraph.export.kernels import Choice, Form, choose, facts_of
from attngraph.export.kernels.choice import candidates
from attngraph.export.kernels.table import (
    ATTENTION,
    BLOCKS,
    GROUPED,
    MASKED,
    NONPAD,
    PRIMITIVE,
    WITH_NORMS,
    WITH_ROTARY,
)
from attngraph.export.lowering.lower import lower
from attngraph.export.target import parse_target
from attngraph.ir import Graph, format_graph, interpret
from tests.export.lowered import assert_same, graph_of, op_types, random_inputs, run, session_of

CPU = parse_target("cpu")
WINDOW = 5
SIZES = (1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 70)
CAUSAL = ", causal = true"
NEAR = f"{CAUSAL}, window = {WINDOW}"


def site(
    attrs: str = "",
    *,
    given: Sequence[str] = (),
    before: Sequence[str] = (),
    width: int = 16,
    keys: str = "seq",
    table: str = "1",
    head: int = 16,
) -> Graph:
    """One attention of 4 heads of 16 and 2 key-value heads.

    `given` are some of mask, bias, sinks, lengths; `before` some of norms, rotary, interleaved.
    """
    types = {
        "bias": "f32[4, seq, seq]",
        "mask": f"bool[batch, 1, 1, {keys}]",
        "sinks": "f32[4]",
        "row_sinks": "f32[batch, 4, seq, 1]",
        "lengths": "i64[batch]",
    }
    body = f"  input %q : f32[batch, seq, {4 * head}]\n"
    body += f"  input %k : f32[batch, {keys}, {2 * head}]\n  input %v : f32[batch, {keys}, 32]\n"
    body += "".join(f"  input %{name} : {types[name]}\n" for name in given)
    names = {"q": ("q", 4), "k": ("k", 2)}
    for name, (value, heads) in names.items():
        if "norms" in before:
            shape = f"[batch, seq, {heads}, 16]"
            body += f"  input %{name}_scale : f32[16]\n"
            body += f"  %{name}_split = aten.reshape(%{value}) {{shape = {shape}}} : f32{shape}\n"
            body += f"  %{name}_norm = attn.rms_norm(%{name}_split, %{name}_scale)"
            body += f" {{eps = 1e-5}} : f32{shape}\n"
            shape = f"[batch, seq, {heads * 16}]"
            body += (
                f"  %{name}_flat = aten.reshape(%{name}_norm) {{shape = {shape}}} : f32{shape}\n"
            )
            names[name] = f"{name}_flat", heads
    if "rotary" in before:
        half, kind = width // 2, f"f32[batch, seq, {width // 2}]"
        for name in ("cos", "sin"):
            body += f"  input %{name} : f32[{table}, seq, {half}]\n"
            body += f"  %{name}s = aten.expand(%{name}) {{size = [batch, seq, {half}]}} : {kind}\n"
        for name, (value, heads) in names.items():
            extra = ", interleaved = true" if "interleaved" in before else ""
            body += f"  %{name}_turned = attn.rotary(%{value}, %coss, %sins) {{heads = {heads}"
            body += f"{extra}}} : f32[batch, seq, {heads * 16}]\n"
            names[name] = f"{name}_turned", heads
    operands = [f"%{names['q'][0]}", f"%{names['k'][0]}", "%v"]
    for name in ("bias", "mask", "sinks", "past_key", "past_value", "lengths"):
        found = [other for other in given if other in (name, f"row_{name}")]
        operands.append(f"%{found[0]}" if found else "none")
    made, kind = "%y", "f32[batch, seq, 64]"
    if "weights" in attrs:
        made, kind = "%y, %w", f"{kind}, f32[batch, 4, seq, {keys}]"
    body += f"  {made} = attn.attention({', '.join(operands)}) {{heads = 4, kv_heads = 2"
    return graph_of(f"{body}, scale = 0.4{attrs}}} : {kind}\n  return {made}")


def inputs_of(graph: Graph, length: int) -> list[torch.Tensor]:
    """Lengths below, at and above what there is; masks with rows that see nothing."""
    sizes = {"batch": 7, "seq": length, "keys": length + 3}
    found = random_inputs(graph, sizes, seed=length)
    for place, value in enumerate(graph.inputs):
        if value.name == "lengths":
            found[place] = torch.tensor(
                [length, 1, 0, length - 1, (length + 1) // 2, -2, length + 4]
            )
        if value.name == "mask":
            found[place][1] = False
        if value.name in ("sinks", "row_sinks"):
            found[place] *= 4
    return found


def agree(
    graph: Graph,
    form: Form,
    *,
    start: int = 0,
    below: Form | None = None,
    sizes: Sequence[int] = SIZES,
) -> list[str]:
    """Asserts that a form gives what the reference gives at all sizes; returns its operators."""
    (node,) = (node for node in graph if node.op == "attn.attention")
    model = lower(graph, kernels={node: Choice(form, "any", start, below)})
    session = session_of(model)
    for length in sizes:
        inputs = inputs_of(graph, length)
        for actual, wanted in zip(run(session, inputs), interpret(graph, inputs), strict=True):
            assert_same(actual, wanted, f"length {length}")
    return op_types(model)


def refused(graph: Graph, form: Form, target: str = "cpu") -> str:
    """Why a form is refused at the one attention of a graph."""
    (node,) = (node for node in graph if node.op == "attn.attention")
    found = candidates(facts_of(node, graph.dims), parse_target(target), (1, 31))
    reasons = [candidate.refused for candidate in found if candidate.form == form]
    return reasons[0] if reasons else "pointless"


BOUNDED = {
    "window": site(NEAR),
    "window and softcap": site(f"{NEAR}, softcap = 2.0"),
    "window of one": site(f"{CAUSAL}, window = 1"),
    "lengths": site(given=["lengths"]),
    "causal lengths": site(CAUSAL, given=["lengths"]),
    "window and lengths": site(NEAR, given=["lengths"]),
    "sinks": site(given=["sinks"]),
    "causal sinks": site(CAUSAL, given=["sinks"]),
    "window, sinks and softcap": site(f"{NEAR}, softcap = 2.0", given=["sinks"]),
    "sinks and lengths": site(given=["sinks", "lengths"]),
    "causal sinks and lengths": site(CAUSAL, given=["sinks", "lengths"]),
    "sinks and padding": site(CAUSAL, given=["sinks", "mask"]),
    "sinks and a bias": site(NEAR, given=["sinks", "bias"]),
    "sinks of each query": site(CAUSAL, given=["row_sinks", "mask"]),
    "window and padding": site(NEAR, given=["mask"]),
    "lengths of other keys": site(given=["lengths"], keys="keys"),
    "rotary": site(CAUSAL, before=["rotary"]),
    "rotary by neighbours": site(NEAR, before=["rotary", "interleaved"]),
    "rotary both ways": site(before=["rotary"], given=["lengths"]),
    "rotary and sinks": site(NEAR, before=["rotary"], given=["sinks"]),
}


HIDDEN = {
    "lengths": ("", ["lengths"]),
    "causal lengths": (CAUSAL, ["lengths"]),
    "window and lengths": (NEAR, ["lengths"]),
    "window and padding": (NEAR, ["mask"]),
    "window, padding and a bias": (NEAR, ["mask", "bias"]),
    "window of one and lengths": (f"{CAUSAL}, window = 1", ["lengths"]),
}
"""Where rows may have no key: past a length, or where a window ends behind the last one."""


@pytest.mark.parametrize("policy", ["mean", "nan"])
@pytest.mark.parametrize("name", HIDDEN)
def test_rows_without_keys_are_what_the_policy_says(name: str, policy: str) -> None:
    attrs, given = HIDDEN[name]
    _check_every_form(site(f'{attrs}, masked_rows = "{policy}"', given=given))


@pytest.mark.parametrize("name", BOUNDED)
def test_whatever_the_table_allows_runs(name: str) -> None:
    _check_every_form(BOUNDED[name])


def _check_every_form(graph: Graph) -> None:
    (node,) = (node for node in graph if node.op == "attn.attention")
    found = candidates(facts_of(node, graph.dims), CPU, (1, 31))
    legal = [candidate.form for candidate in found if not candidate.refused]
    assert {ATTENTION, PRIMITIVE} <= set(legal)
    for form in legal:
        cut = form.blocks > 1
        agree(graph, form, start=form.blocks**2 if cut else 0, below=MASKED if cut else None)


@pytest.mark.parametrize("given", [["sinks"], ["row_sinks", "bias"]])
def test_sinks_with_weights(given: list[str]) -> None:
    """Of a static length, which `Attention` asks for; the sinks' own weight is left out."""
    graph = site(f"{CAUSAL}, weights = true", given=given)
    agree(graph, PRIMITIVE)
    static = graph_of("\n".join(_body(graph)).replace("seq", "9"))
    agree(static, ATTENTION, sizes=[9])


def test_bounds_reach_the_operator_without_a_mask() -> None:
    without = {"LessOrEqual", "Greater", "And"}
    assert not without & set(agree(BOUNDED["window"], GROUPED))
    assert not without & set(agree(BOUNDED["causal sinks"], GROUPED))
    found = agree(BOUNDED["lengths"], NONPAD)
    assert not without & set(found)
    assert found.count("Less") == 2  # the lengths, between 0 and the number of keys
    assert "RotaryEmbedding" not in agree(BOUNDED["rotary"], WITH_ROTARY)


def test_a_window_lets_blocks_leave_out_keys() -> None:
    graph = graph_of(
        "  input %x : f32[batch, 16, 64]\n  %y = attn.attention(%x, %x, %x)"
        f" {{heads = 4, kv_heads = 4, scale = 0.4{NEAR}}} : f32[batch, 16, 64]\n  return %y"
    )
    (node,) = graph
    model = lower(graph, kernels={node: Choice(BLOCKS[1], "any")})
    keys = [op.inputs[1] for op in model.graph if op.op_type == "Attention"]
    assert [value.shape[1] for value in keys if value is not None and value.shape] == [4, 8, 8, 8]
    inputs = random_inputs(graph, {"batch": 2})
    (actual,) = run(session_of(model), inputs)
    assert_same(actual, torch.as_tensor(interpret(graph, inputs)[0]))


@pytest.mark.parametrize("name", ["window", "lengths", "causal lengths", "causal sinks"])
def test_layers_share_bounds(name: str) -> None:
    """A second layer adds its operator, and what it gives elements without a key."""
    body = _body(BOUNDED[name])
    (made,) = (line for line in body if "attn.attention" in line)
    second = made.replace("%y = attn.attention(%q", "%z = attn.attention(%y")
    graphs = BOUNDED[name], graph_of("\n".join([*body[:-1], second, "  return %z"]))
    kernels = [{n: Choice(GROUPED, "any") for n in g if "attention" in n.op} for g in graphs]
    once, twice = (
        Counter(op_types(lower(graph, kernels=chosen)))
        for graph, chosen in zip(graphs, kernels, strict=True)
    )
    assert set(twice - once) <= {"GroupQueryAttention", "Reshape", "Transpose", "Where"}


@pytest.mark.parametrize(
    ("graph", "why"),
    [
        (site(CAUSAL, before=["rotary"], width=8), "it runs only where R % 16 = 0 and D % 16 = 0"),
        (site(CAUSAL, before=["rotary"], table="batch"), "pointless"),
        (site(CAUSAL, before=["rotary"], given=["mask"]), "it takes no bool mask"),
        (
            site(f", window = {WINDOW}", before=["rotary"]),
            "it runs only where no window, or causal",
        ),
    ],
)
def test_rotary_stays_outside(graph: Graph, why: str) -> None:
    assert refused(graph, WITH_ROTARY) == why


def test_norms_go_inside_on_cuda_only() -> None:
    graph = site(CAUSAL, before=["norms", "rotary"])
    half = _halved(graph)
    assert refused(graph, WITH_NORMS) == "pointless"
    assert refused(half, WITH_NORMS, "cuda:sm80") == ""
    (node,) = (node for node in half if node.op == "attn.attention")
    chosen = choose(facts_of(node, half.dims), parse_target("cuda:sm80"))
    assert (chosen.form, chosen.kernel) == (WITH_NORMS, "Flash")
    model = lower(half, target="cuda:sm80", kernels={node: chosen})
    assert not {"RMSNormalization", "RotaryEmbedding"} & set(op_types(model))
    (op,) = (n for n in model.graph if n.op_type == "GroupQueryAttention")
    assert op.attributes["qk_norm_epsilon"].as_float() == pytest.approx(1e-5)
    assert [value.name for value in op.inputs[-2:] if value is not None] == ["q_scale", "k_scale"]


def test_sinks_need_an_sm_that_is_known_on_cuda() -> None:
    half = _halved(site(CAUSAL, given=["sinks"]))
    assert refused(half, GROUPED, "cuda:sm80") == ""
    assert refused(half, GROUPED, "cuda") == "cuda is not known to have SM ≥ 80"
    assert refused(half, GROUPED, "cuda:sm75") == "cuda:sm75 is not known to have SM ≥ 80"


def test_lengths_are_no_matter_of_grouped_heads_on_cuda() -> None:
    half = _halved(site(CAUSAL, given=["lengths"]))
    assert refused(half, GROUPED, "cuda:sm90") == "it takes no lengths"


def _body(graph: Graph) -> list[str]:
    lines = format_graph(graph).splitlines()
    return [line for line in lines[1:-1] if not line.strip().startswith("dim ")]


def _halved(graph: Graph) -> Graph:
    return graph_of("\n".join(_body(graph)).replace("f32", "f16"))
