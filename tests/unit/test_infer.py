"""Types come from evaluation on fake tensors: symbolic where the sizes are."""

from __future__ import annotations

from typing import Any

import pytest

from attngraph.errors import IRError
from attngraph.ir import Graph, parse, settling, verify
from attngraph.ir.dims import DimInfo, parse_dim, same, symbols_of
from attngraph.ir.infer import TypeInference
from attngraph.ir.ops import op_def
from attngraph.ir.parser import parse_type
from attngraph.ir.settling import settled
from attngraph.ir.types import ScalarType

HEADER = """graph @main {
  dim batch = 3 in 1..
  dim seq = 5 in 1..
  input %x : f32[batch, seq, 12]
  input %half : f16[batch, seq, 12]
  input %past : f32[batch, seq + 7, 12]
  input %n : i64[seq]
  input %one : f32[1, seq, 1]
  input %w : f32[12, 3]
  input %m : i64[seq]
"""


def _infer(call: str) -> Graph:
    return parse(f"{HEADER}  {call}\n  return %x\n}}")


@pytest.mark.parametrize(
    ("call", "types"),
    [
        ("%a = aten.reshape(%x) {shape = [batch, -1, 4]}", ["f32[batch, 3*seq, 4]"]),
        ("%a = aten.reshape(%x) {shape = [batch * seq, 12]}", ["f32[batch*seq, 12]"]),
        ("%a = aten.cat(%x, %past) {dim = 1}", ["f32[batch, 2*seq + 7, 12]"]),
        ("%a = aten.add.Tensor(%x, %one)", ["f32[batch, seq, 12]"]),
        ("%a = aten.add.Tensor(%half, %x)", ["f32[batch, seq, 12]"]),
        ("%a = aten.mul.Scalar(%half) {other = 2.0}", ["f16[batch, seq, 12]"]),
        ("%a = aten.matmul(%x, %w)", ["f32[batch, seq, 3]"]),
        ("%a = aten.arange() {end = seq + 1}", ["i64[seq + 1]"]),
        ("%a = aten.slice.Tensor(%past) {dim = 1, start = -1}", ["f32[batch, 1, 12]"]),
        ("%a = aten.slice.Tensor(%past) {dim = 1, end = seq}", ["f32[batch, seq, 12]"]),
        ("%a, %b = aten.topk(%x) {k = 2}", ["f32[batch, seq, 2]", "i64[batch, seq, 2]"]),
        ("%a = aten.sum.dim_IntList(%x) {dim = [1]}", ["f32[batch, 12]"]),
        (
            "%a = attn.attention(%x, %past, %past) {heads = 3, kv_heads = 3, scale = 0.5}",
            ["f32[batch, seq, 12]"],
        ),
        (
            "%a, %b = attn.attention(%x, %past, %past) "
            "{heads = 3, kv_heads = 1, scale = 0.5, weights = true}",
            ["f32[batch, seq, 36]", "f32[batch, 3, seq, seq + 7]"],
        ),
    ],
)
def test_a_result_is_as_symbolic_as_its_inputs(call: str, types: list[str]) -> None:
    if "kv_heads = 1" in call:
        call = call.replace("%x,", "%wide,")
        call = f"%wide = aten.repeat(%x) {{repeats = [1, 1, 3]}}\n  {call}"
    graph = _infer(call)
    outputs = list(graph)[-1].outputs
    assert [value.type for value in outputs] == [parse_type(type) for type in types]
    verify(graph)


@pytest.mark.parametrize(
    "call",
    [
        "%a = aten.matmul(%x, %x)",
        "%a = aten.reshape(%x) {shape = [batch, seq, 13]}",
        "%a = aten.cat(%x, %half, %n) {dim = 1}",
    ],
)
def test_what_evaluation_rejects_is_an_error_that_shows_the_types(call: str) -> None:
    with pytest.raises(IRError, match=r"is rejected by its evaluation: "):
        _infer(call)


def test_a_size_that_only_a_run_can_tell_becomes_a_new_dim() -> None:
    graph = _infer("%a = aten.nonzero(%n)\n  %b = aten.nonzero(%m)")
    first, second = (symbols_of(node.output.shape) for node in graph)
    assert len(first) == len(second) == 1
    assert first != second
    assert (first | second) <= graph.dims.keys()
    verify(graph)


def test_a_number_that_only_a_run_can_tell_is_a_scalar() -> None:
    graph = _infer("%a = aten.sum(%n)\n  %b = aten.item(%a)")
    type = list(graph)[-1].output.type
    assert isinstance(type, ScalarType)
    assert type.kind == "int"
    assert type.name in graph.dims


def test_no_dim_is_fixed_by_inferring() -> None:
    dims = {"seq": DimInfo(low=1, high=16, hint=1)}
    inference = TypeInference(dims)
    graph = parse("graph @main {\n dim seq = 1 in 1..16\n input %x : f32[seq, 1]\n return %x\n}")
    (type,) = inference.infer(op_def("aten.squeeze"), graph.inputs, {})
    assert type == parse_type("f32[seq]")
    assert dims == {"seq": DimInfo(low=1, high=16, hint=1)}


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ("2048 - max(0, 2048 - seq)", "seq"),
        ("1 - max(0, 1 - seq)", "1"),
        ("min(seq, 2048) + max(0, seq - 2048)", "seq"),
        ("max(seq, 2048 - max(0, 2048 - seq))", "seq"),
        ("max(0, seq - 5)", "max(0, seq - 5)"),
        ("max(seq, far)", "max(seq, far)"),
        ("min(far, seq) - max(0, 3 - far)", "min(far, seq) - max(0, 3 - far)"),
        ("max(0, 64 - seq) * max(far, 0)", "(64 - seq) * far"),
        ("min(seq, seq // 2, seq // 4)", "seq // 4"),
        ("max(seq + 2, seq, seq + 1, far)", "max(seq + 2, far)"),
        ("min(2 * seq, 2 * seq * far + 2 * seq, 2 * seq * seq)", "2 * seq"),
        ("min(2 * seq, 2 * seq * far)", "min(2 * seq, 2 * seq * far)"),  # far may be 0
    ],
)
def test_a_max_that_the_ranges_decide_is_gone(size: str, expected: str) -> None:
    dims = {"seq": DimInfo(low=1, high=64), "far": DimInfo(low=0, high=None)}
    assert same(settled(parse_dim(size), dims), parse_dim(expected))
    assert settled([parse_dim(size), None], dims)[1] is None


def test_sizes_of_a_graph_settle_in_types_and_attributes() -> None:
    text = """graph @main {
  dim seq = 5 in 1..64
  input %x : f32[2048, 8]
  input %z : f32[seq]
  %y = aten.slice.Tensor(%x) {start = max(0, 2048 - seq)} : f32[2048 - max(0, 2048 - seq), 8]
  return %y
}"""
    graph = parse(text)
    verify(graph)
    graph.settle_sizes()
    verify(graph)
    (node,) = graph
    assert str(node.output.type) == "f32[seq, 8]"
    assert node.attrs["start"] == parse_dim("2048 - seq")
    epoch = graph.epoch
    graph.settle_sizes()
    assert graph.epoch == epoch


def test_a_size_that_many_values_have_is_settled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks have the same few quotients in hundreds of shapes and attributes."""
    text = """graph @main {
  dim seq = 9 in 1..64
  input %x : f32[(seq + 7) // 8, 8]
  %a = aten.exp(%x)
  %b = aten.sum.dim_IntList(%a) {dim = [1], keepdim = true}
  %y = aten.expand(%b) {size = [(seq + 7) // 8, 4]}
  return %y
}"""
    graph, found = parse(text), list[Any]()
    own = settling._settled

    def counted(size: Any, infos: Any) -> Any:
        found.append(size)
        return own(size, infos)

    monkeypatch.setattr(settling, "_settled", counted)
    graph.settle_sizes()
    assert found == [parse_dim("(seq + 7) // 8")]


@pytest.mark.parametrize(
    ("size", "ends", "expected"),
    [
        ("8 * ((seq + 7) // 8)", (1, 8), "8"),
        ("8 * ((seq + 7) // 8)", (1, 9), "8 * ((seq + 7) // 8)"),
        ("(seq + 14) // 16", (2, 17), "(seq + 14) // 16"),  # 0 at 1, which 2 stands for
        ("(seq + 14) // 16 + seq", (3, 17), "seq + 1"),
        ("seq // 8", (1, None), "seq // 8"),
    ],
)
def test_a_quotient_settles_that_is_one_number_for_all_sizes(
    size: str, ends: tuple[int, int | None], expected: str
) -> None:
    infos = {"seq": DimInfo(ends[0], ends[1], 5)}
    assert settled(parse_dim(size), infos) == parse_dim(expected)


def test_what_is_remembered_holds_for_the_same_range_alone() -> None:
    found = []
    for low, high in ((6, 9), (2, 3), (6, 9)):
        dims = {"seq": DimInfo(low, high, low)}
        graph = parse("graph @main {\n dim seq = 8 in 2..\n input %x : f32[seq]\n return %x\n}")
        attrs = {"dim": 0, "start": 0, "end": 5}
        found += TypeInference(dims).infer(op_def("aten.slice.Tensor"), graph.inputs, attrs)
    assert found == [parse_type("f32[5]"), parse_type("f32[seq]"), parse_type("f32[5]")]


def test_what_one_evaluation_assumes_of_sizes_is_not_remembered() -> None:
    graph = parse(
        "graph @main {\n dim left = 8 in 2..\n dim right = 8 in 2..\n"
        " input %x : f32[left]\n input %y : f32[right]\n return %x\n}"
    )
    first, second = TypeInference(graph.dims), TypeInference(graph.dims)
    first.infer(op_def("aten.add.Tensor"), graph.inputs, {})
    for value in graph.inputs:
        first.infer(op_def("aten.cos"), [value], {})
        assert second.infer(op_def("aten.cos"), [value], {}) == (value.type,)


@pytest.mark.parametrize("sample", [2, 7, 100])
@pytest.mark.parametrize("size", ["(31 + s) // 32", "s - 1", "(s + 1) // 2", "2*s - 3"])
def test_a_size_that_is_1_in_the_sample_stays_open(sample: int, size: str) -> None:
    """Blocks of 32 are one at 7 tokens, and one block would broadcast."""
    graph = parse(f"""graph @main {{
  dim b = 2 in 1..
  dim s = {sample} in 1..
  input %x : f32[b, {size}, 32, 4]
  input %y : f32[b, {size}, 4, 96]
  %before = aten.add.Tensor(%x, %x)
  %z = aten.matmul(%x, %y)
  %after = aten.mul.Tensor(%z, %z)
  %batch = aten.reshape(%z) {{shape = [b * ({size}), 32 * 96]}}
  input %w : f32[2, {size}, 32, 4]
  %two = aten.reshape(%w) {{shape = [2 * ({size}), 32, 4]}}
  return %before, %z, %after, %batch, %two
}}""")
    expected = parse_dim(size)
    *kept, batch, two = graph.outputs
    assert two.shape == (parse_dim(f"2 * ({size})"), 32, 4)
    assert [value.shape[1] for value in kept] == [expected] * 3
    assert batch.shape == (parse_dim(f"b * ({size})"), 32 * 96)


def test_a_size_of_few_places_that_is_always_1_is_1() -> None:
    graph = parse("""graph @main {
  dim s = 7 in 1..24
  input %x : f32[(31 + s) // 32, 4]
  %y = aten.mul.Tensor(%x, %x)
  return %y
}""")
    assert graph.outputs[0].shape == (1, 4)


@pytest.mark.parametrize(("sample", "count"), [(3, 1), (7, 2)])
def test_a_split_has_as_many_parts_as_in_the_sample(sample: int, count: int) -> None:
    parts = ", ".join(f"%p{place}" for place in range(count))
    graph = parse(f"""graph @main {{
  dim s = {sample} in 1..
  input %x : f32[s, 4]
  input %y : f32[(31 + s) // 32, 4]
  %z = aten.mul.Tensor(%y, %y)
  {parts} = aten.split.Tensor(%x) {{split_size = 4}}
  return %z, {parts}
}}""")
    assert len(graph.outputs) == 1 + count
    assert graph.outputs[0].shape[0] == parse_dim("(31 + s) // 32")
    verify(graph)


def test_sizes_that_go_together_in_the_sample_alone_do_so_after_others_were_enlarged() -> None:
    graph = parse("""graph @main {
  dim past = 4 in 1..
  dim whole = 5 in 1..
  input %x : f32[past + 1, 4]
  input %y : f32[whole, 4]
  input %z : f32[(31 + past) // 32, 4]
  %a = aten.mul.Tensor(%z, %z)
  %b = aten.add.Tensor(%x, %y)
  %c = aten.mul.Tensor(%a, %z)
  return %a, %b, %c
}""")
    assert [value.shape[0] for value in graph.outputs if value.name != "b"] == [
        parse_dim("(31 + past) // 32")
    ] * 2
