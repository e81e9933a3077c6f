"""Integers, which wrap around: what onnxruntime's kernels compute in double, or not at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.export import Dim

from attngraph.export.kernels import Choice, facts_of
from attngraph.export.kernels.choice import candidates
from attngraph.export.kernels.facts import LENGTHS
from attngraph.export.lowering.lower import lower
from attngraph.export.target import parse_target
from attngraph.frontend.capture import capture
from attngraph.ir import interpret
from tests.export.lowered import assert_same, check, graph_of, op_types, run, session_of
from tests.variants import some_wide

TIMES = torch.tensor([0, 5, 2**31 - 1, 2**31, 2**31 + 5, 2**32 - 1, 2**32, -(2**31) - 1, 2**62])
"""Milliseconds: 2³¹ of them are 25 days."""


class Buckets(torch.nn.Module):
    """A bias looked up by how long ago each key was."""

    def __init__(self, how: str, bounds: torch.Tensor | None) -> None:
        super().__init__()
        self.how, self.table = how, torch.nn.Embedding(257, 4)
        self.register_buffer("bounds", bounds)

    def forward(self, times: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ago = times[:, None] - times[None]
        if self.bounds is not None:
            ago = torch.minimum(torch.maximum(ago, self.bounds[0]), self.bounds[1])
        elif self.how == "clamp":
            ago = ago.clamp(0, 256)
        elif self.how == "clamp_min":
            ago = 256 - (256 - ago.clamp_min(0)).clamp_min(0)
        elif self.how == "relu":
            ago = (256 - (256 - ago.relu()).relu()).abs()
        elif self.how == "computed":
            low = times.amin() * 0
            ago = torch.minimum(torch.maximum(ago, low), low + 256)
        elif self.how == "tensors":
            ago = torch.clamp(ago, times[0] * 0, times[0] * 0 + 256)
        elif self.how == "sign":
            ago = ago.sign() + 1
        return torch.softmax(x @ x.mT + self.table(ago).mean(-1), -1) @ x


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    "how", ["clamp", "clamp_min", "relu", "computed", "tensors", "sign", "constants"]
)
def test_time_differences_above_25_days(how: str, dynamic: bool) -> None:
    torch.manual_seed(0)
    bounds = torch.tensor([0, 256]) if how == "constants" else None
    module = Buckets(how, bounds).eval()
    inputs = (TIMES, torch.randn(len(TIMES), 8))
    seq = Dim("seq", min=2, max=64)
    shapes = ({0: seq}, {0: seq}) if dynamic else None
    graph = capture(module, inputs, dynamic_shapes=shapes).graph
    session = session_of(lower(graph))
    for order in (slice(None), slice(1, 6)) if dynamic else (slice(None),):
        feeds = [part[order] for part in inputs]
        (found,) = run(session, feeds)
        assert_same(found, module(*feeds).detach(), how)
        assert_same(found, interpret(graph, feeds)[0], how)


@pytest.mark.parametrize("causal", ["", ", causal = true"])
def test_a_length_beyond_the_keys_means_all_of_them(causal: str) -> None:
    """As `position < length` says, in every form of an attention."""
    count = len(TIMES)
    graph = graph_of(
        f"  input %x : f32[{count}, 5, 8]\n  input %n : i64[{count}]\n"
        "  %r = attn.attention(%x, %x, %x, none, none, none, none, none, %n)"
        f' {{heads = 1, kv_heads = 1, scale = 0.5, masked_rows = "zero"{causal}}}\n  return %r'
    )
    (node,) = graph
    inputs = [torch.randn(count, 5, 8, generator=torch.Generator().manual_seed(0)), TIMES]
    forms = candidates(facts_of(node, graph.dims), parse_target("cpu"), (1, 31))
    legal = [candidate.form for candidate in forms if not candidate.refused]
    assert any(LENGTHS in form.native for form in legal)
    for form in legal:
        (found,) = run(session_of(lower(graph, kernels={node: Choice(form, "any")})), inputs)
        assert_same(found, interpret(graph, inputs)[0], form.name)


@pytest.mark.parametrize("call", ["maximum(%x, %y)", "minimum(%x, %y)"])
@pytest.mark.parametrize(
    "shapes", [("9", "9"), ("9", "1"), ("", "9"), ("9, 1", "9"), ("9", "9, 1")]
)
def test_extremes_of_every_shape(call: str, shapes: tuple[str, str]) -> None:
    inputs = [TIMES.flip(0), TIMES]
    sized = []
    for shape, values in zip(shapes, inputs, strict=True):
        sizes = [int(size) for size in shape.split(", ") if size]
        sized.append(values[: max([1, *sizes])].reshape(sizes))
    lines = "".join(f"  input %{n} : i64[{s}]\n" for n, s in zip("xy", shapes, strict=True))
    check(f"{lines}  %r = aten.{call}\n  return %r", inputs=sized)


@pytest.mark.parametrize("dtype", ["i32", "f32", "f16", "f64", "u8"])
def test_other_dtypes_keep_the_one_operator(dtype: str) -> None:
    lines = f"  input %x : {dtype}[9]\n  input %y : {dtype}[9]\n"
    model = lower(graph_of(f"{lines}  %r = aten.maximum(%x, %y)\n  return %r"))
    assert op_types(model) == ["Max"]


def test_a_clamp_of_integers_is_two_choices() -> None:
    graph = graph_of("  input %x : i64[9]\n  %r = aten.clamp(%x) {min = 0, max = 256}\n  return %r")
    assert op_types(lower(graph)) == ["Less", "Where", "Less", "Where"]


WRAPPED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "floor": lambda x: x // 3,
    "floor-by-negative": lambda x: torch.div(x, -3, rounding_mode="floor"),
    "floor-by-tensor": lambda x: x // x.flip(0).clamp(min=1),
    "remainder": lambda x: x % -5,
    "negative": lambda x: -x,
    "sum": lambda x: x.sum(0, dtype=x.dtype),
    "running-sum": lambda x: x.cumsum(0, dtype=x.dtype),
    "product": lambda x: (x | 1).prod(0),
    "product-of-all": lambda x: (x | 1).prod(),
    "right": lambda x: x[:, None] >> torch.arange(8, dtype=x.dtype),
    "left": lambda x: x[:, None] << torch.arange(8, dtype=x.dtype),
    "far": lambda x: x.long() >> torch.full_like(x, 63).long(),
    "among": lambda x: torch.isin(x, torch.tensor([0, 2, 3], dtype=x.dtype), invert=True),
}


_LESS_COMMON = [
    pytest.param(each, marks=pytest.mark.wide) for each in (torch.int8, torch.uint8, torch.int16)
]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, *_LESS_COMMON], ids=str)
@pytest.mark.parametrize("name", some_wide(WRAPPED))
def test_integers_wrap_around_as_in_torch(name: str, dtype: torch.dtype) -> None:
    ends = torch.iinfo(dtype)
    near = [ends.min, ends.min + 1, ends.min + 2, 0, 1, 2, 3, ends.max // 2 + 1, ends.max - 1]
    x = torch.tensor([*near, ends.max], dtype=dtype)
    given = torch.arange(4, dtype=dtype)
    model = _Applied(WRAPPED[name])
    graph = capture(model, (given,), dynamic_shapes=({0: Dim("n", max=64)},)).graph
    (found,) = run(session_of(lower(graph)), [x])
    assert_same(found, model(x), name)


BEYOND: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "times": lambda x: x * 70_001,
    "plus": lambda x: x + 40_000,
    "minus": lambda x: x - 300,
    "from": lambda x: 1_000_000 - x,
    "left": lambda x: x << 3,
    "right": lambda x: x >> 3,
    "left-all": lambda x: torch.bitwise_left_shift(x, 15),
    "right-all": lambda x: torch.bitwise_right_shift(x, 15),
    "left-each": lambda x: x << torch.arange(4, dtype=x.dtype)[:, None],
}


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16], ids=str)
@pytest.mark.parametrize("name", BEYOND)
def test_a_number_beyond_a_small_dtype_has_its_bits(name: str, dtype: torch.dtype) -> None:
    ends = torch.iinfo(dtype)
    x = torch.tensor([ends.min, ends.min + 1, 0, 1, 7, ends.max - 1, ends.max], dtype=dtype)
    model = _Applied(BEYOND[name])
    graph = capture(model, (x[:4],), dynamic_shapes=({0: Dim("n", max=64)},)).graph
    (found,) = run(session_of(lower(graph)), [x])
    assert_same(found, model(x), name)


class _Applied(torch.nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def test_what_cant_be_next_to_the_least_integer_is_divided_at_once() -> None:
    model, sizes = _Applied(lambda x: x * (torch.arange(x.shape[0]) // 4)), {0: Dim("n", max=64)}
    graph = capture(model, (torch.ones(9),), dynamic_shapes=(sizes,)).graph
    assert "Less" not in op_types(lower(graph))


def test_a_product_of_bytes_is_in_32_bits() -> None:
    """As hand-written quantized linears have it."""
    weight = torch.tensor([[-128, 127, 5], [-128, 127, -7], [1, -128, 0], [-128, 127, 127]])

    class Codes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", weight.to(torch.int8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch._int_mm(x, self.codes)

    model, x = Codes(), torch.tensor([[-128, -128, 127, -128], [127] * 4, [0, 1, 2, 3]])
    dims = ({0: Dim("n", max=64)},)
    graph = capture(model, (x[:2].to(torch.int8),), dynamic_shapes=dims).graph
    (found,) = run(session_of(lower(graph)), [x.to(torch.int8)])
    assert_same(found, (x.int() @ weight.int()), "bytes")


@pytest.mark.parametrize("depth", [1024, 1025, 5000])
def test_a_long_product_of_bytes_is_exact(depth: int) -> None:
    weight = torch.full((depth, 2), -128, dtype=torch.int8)

    class Codes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch._int_mm(x, self.codes)

    x = torch.full((3, depth), -128, dtype=torch.int8)
    x[1, ::2] = 127
    x[2, 0] = -127
    (found,) = run(session_of(lower(capture(Codes(), (x,)).graph)), [x])
    assert_same(found, x.int() @ weight.int(), "bytes")
