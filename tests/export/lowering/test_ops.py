"""Every op's ONNX form computes what the interpreter computes, at several sizes."""

from __future__ import annotations

import pytest
import torch

from tests.export.lowered import check

X = "  input %x : f32[batch, seq, 8]\n"
XY = X + "  input %y : f32[batch, seq, 8]\n"
INTS = "  input %i : i64[batch, seq]\n  input %j : i64[batch, seq]\n"
BOOLS = "  input %a : bool[batch, seq]\n  input %b : bool[batch, seq]\n"

UNARY = [
    "abs", "neg", "floor", "ceil", "round", "sign", "exp", "sin", "cos", "tan", "tanh", "sigmoid",
    "relu", "erf", "reciprocal", "square", "gelu", "silu", "isnan", "isinf", "nan_to_num",
    "positive", "contiguous", "clone", "alias", "detach", "logical_not", "expm1", "hardswish",
    "mish", "selu", "softplus", "log_sigmoid", "leaky_relu", "elu", "hardtanh", "relu6", "trunc",
    "atan",
]  # fmt: skip

CASES = {
    # arithmetic and promotion
    "add": (XY, "aten.add.Tensor(%x, %y)"),
    "add-alpha": (XY, "aten.add.Tensor(%x, %y) {alpha = 0.5}"),
    "sub-alpha": (XY, "aten.sub.Tensor(%x, %y) {alpha = 2}"),
    "add-int-float": (X + "  input %i : i64[batch, 1, 8]\n", "aten.add.Tensor(%i, %x)"),
    "add-bool-int": (INTS + BOOLS, "aten.add.Tensor(%i, %a)"),
    "add-bool": (BOOLS, "aten.add.Tensor(%a, %b)"),
    "mul-bool": (BOOLS, "aten.mul.Tensor(%a, %b)"),
    "mul-i32-i64": ("  input %i : i32[seq]\n  input %j : i64[seq]\n", "aten.mul.Tensor(%i, %j)"),
    "mul-scalar": (X, "aten.mul.Scalar(%x) {other = 2}"),
    "mul-int-by-float": (INTS, "aten.mul.Scalar(%i) {other = 0.5}"),
    "mul-dim": (X, "aten.mul.Scalar(%x) {other = seq}"),
    "mul-root-of-dim": (X, "aten.mul.Scalar(%x) {other = math.sqrt(seq)}"),
    "rsub": (X, "aten.rsub.Scalar(%x) {other = 1.0}"),
    "rsub-alpha": (X, "aten.rsub.Scalar(%x) {other = 1.0, alpha = 2}"),
    "div": (XY, "aten.div.Tensor(%x, %y)"),
    "div-ints": (INTS, "aten.div.Scalar(%i) {other = 2}"),
    "div-floor-ints": (INTS, 'aten.div.Scalar_mode(%i) {other = -2, rounding_mode = "floor"}'),
    "div-trunc-ints": (INTS, 'aten.div.Scalar_mode(%i) {other = -2, rounding_mode = "trunc"}'),
    "div-floor": (XY, 'aten.div.Tensor_mode(%x, %y) {rounding_mode = "floor"}'),
    "div-trunc": (XY, 'aten.div.Tensor_mode(%x, %y) {rounding_mode = "trunc"}'),
    "remainder": (X, "aten.remainder.Scalar(%x) {other = -0.7}"),
    "remainder-ints": (INTS, "aten.remainder.Scalar(%i) {other = -3}"),
    "pow-2": (X, "aten.pow.Tensor_Scalar(%x) {exponent = 2}"),
    "pow-3": (X, "aten.pow.Tensor_Scalar(%x) {exponent = 3.0}"),
    "pow-scalar-base": (INTS, "aten.pow.Scalar(%i) {self = 2.0} : f32[batch, seq]"),
    "maximum": (XY, "aten.maximum(%x, %y)"),
    "clamp": (X, "aten.clamp(%x) {min = -0.5, max = 0.5}"),
    "clamp-min": (X, "aten.clamp(%x) {min = 0}"),
    "clamp-ints": (INTS, "aten.clamp(%i) {max = 2}"),
    "gelu-tanh": (X, 'aten.gelu(%x) {approximate = "tanh"}'),
    # comparisons and logic
    "eq-ints": (INTS, "aten.eq.Tensor(%i, %j)"),
    "ne-scalar": (INTS, "aten.ne.Scalar(%i) {other = 0}"),
    "lt-int-float": (INTS, "aten.lt.Scalar(%i) {other = 1.5}"),
    "le-dim": (INTS, "aten.le.Scalar(%i) {other = seq - 3}"),
    "gt-bools": (BOOLS, "aten.gt.Tensor(%a, %b)"),
    "ge-bytes": ("  input %i : u8[seq]\n  input %j : u8[seq]\n", "aten.ge.Tensor(%i, %j)"),
    "and": (BOOLS, "aten.__and__.Tensor(%a, %b)"),
    "bitwise-or": (INTS, "aten.bitwise_or.Tensor(%i, %j)"),
    "bitwise-not": (BOOLS, "aten.bitwise_not(%a)"),
    "logical-and": (INTS, "aten.logical_and(%i, %j)"),
    "where": (BOOLS + "  input %c : bool[seq]\n", "aten.where.self(%a, %b, %c)"),
    "where-true": (BOOLS, "aten.where.ScalarOther(%a, %b) {other = true}"),
    "masked-fill-bools": (BOOLS, "aten.masked_fill.Scalar(%a, %b) {value = false}"),
    "where-scalars": (BOOLS, "aten.where.Scalar(%a) {self = 0.0, other = -inf} : f32[batch, seq]"),
    "masked-fill": (
        X + "  input %m : bool[batch, seq, 1]\n",
        "aten.masked_fill.Scalar(%x, %m) {value = -3.4028234663852886e+38}",
    ),
    # shapes
    "view": (X, "aten.view(%x) {size = [batch, seq, 2, 4]}"),
    "view-merge": (X, "aten.view(%x) {size = [batch * seq, 8]}"),
    "view-split-dim": (X, "aten.view(%x) {size = [seq, batch, 8]}"),
    "view-nothing": (X, "aten.view(%x) {size = [batch, -1, 8]}"),
    "flatten": (X, "aten.flatten.using_ints(%x) {start_dim = 1}"),
    "unflatten": (X, "aten.unflatten.int(%x) {dim = -1, sizes = [2, -1]}"),
    "unsqueeze": (X, "aten.unsqueeze(%x) {dim = -2}"),
    "squeeze": ("  input %x : f32[4, 1, 3, 1]\n", "aten.squeeze(%x)"),
    "squeeze-dim": ("  input %x : f32[batch, 1, seq]\n", "aten.squeeze.dim(%x) {dim = 1}"),
    "squeeze-no": ("  input %x : f32[batch, 1, 3]\n", "aten.squeeze.dim(%x) {dim = 2}"),
    "permute": (X, "aten.permute(%x) {dims = [2, 0, -2]}"),
    "transpose": (X, "aten.transpose.int(%x) {dim0 = -1, dim1 = 0}"),
    "movedim": (X, "aten.movedim.int(%x) {source = 0, destination = -1}"),
    "expand": (
        "  input %x : f32[batch, 1, 1, seq]\n",
        "aten.expand(%x) {size = [batch, 4, seq, seq]}",
    ),
    "expand-rank": (
        "  input %x : f32[seq]\n  input %y : f32[batch]\n",
        "aten.expand(%x) {size = [batch, 3, -1]}",
    ),
    "slice": (X, "aten.slice.Tensor(%x) {dim = 2, start = 1, end = -2}"),
    "slice-step": (X, "aten.slice.Tensor(%x) {dim = -1, start = 1, step = 2}"),
    "slice-all": (X, "aten.slice.Tensor(%x) {dim = 1, start = 0, end = 9223372036854775807}"),
    "slice-dim": ("  input %t : f32[64, 8]\n" + X, "aten.slice.Tensor(%t) {end = seq}"),
    "slice-from-dim": (
        "  input %t : f32[64, 8]\n" + X,
        "aten.slice.Tensor(%t) {start = seq, end = seq + batch}",
    ),
    "select": (X, "aten.select.int(%x) {dim = 1, index = -1}"),
    "select-dim": ("  input %t : f32[65, 8]\n" + X, "aten.select.int(%t) {dim = 0, index = seq}"),
    "cat": (XY, "aten.cat(%x, %y) {dim = -2}"),
    "cat-promotes": (X + "  input %i : i64[batch, 3, 8]\n", "aten.cat(%x, %i) {dim = 1}"),
    "stack": (XY, "aten.stack(%x, %y) {dim = -1}"),
    "repeat": (X, "aten.repeat(%x) {repeats = [2, 1, 3, 1]}"),
    "repeat-dim": (
        "  input %x : f32[1, 3]\n  input %k : f32[batch]\n",
        "aten.repeat(%x) {repeats = [batch, 1]}",
    ),
    "repeat-interleave": (X, "aten.repeat_interleave.self_int(%x) {repeats = 3, dim = 1}"),
    "pad": (X, "aten.constant_pad_nd(%x) {pad = [1, 0, 2, 3], value = 1.5}"),
    "flip": (X, "aten.flip(%x) {dims = [1]}"),
    "roll": (X, "aten.roll(%x) {shifts = [1], dims = [1]}"),
    "roll-of-known-sizes": (
        "  input %x : f32[batch, 4, 8]\n",
        "aten.roll(%x) {shifts = [-11, 2], dims = [-1, 1]}",
    ),
    # reductions
    "mean": (X, "aten.mean.dim(%x) {dim = [-1], keepdim = true}"),
    "mean-all": (X, "aten.mean(%x)"),
    "sum-dims": (X, "aten.sum.dim_IntList(%x) {dim = [0, 2]}"),
    "sum-bools": (BOOLS, "aten.sum.dim_IntList(%a) {dim = [1]}"),
    "sum-all": (INTS, "aten.sum(%i)"),
    "amax": (X, "aten.amax(%x) {dim = [-1], keepdim = true}"),
    "max": (X, "aten.max(%x)"),
    "any": (BOOLS, "aten.any.dim(%a) {dim = -1, keepdim = true}"),
    "all": (INTS, "aten.all(%i)"),
    "all-dim": (BOOLS, "aten.all.dim(%a) {dim = 0}"),
    "argmax": (X, "aten.argmax(%x) {dim = -1}"),
    "argmax-all": (X, "aten.argmax(%x)"),
    "cumsum": (X, "aten.cumsum(%x) {dim = 1}"),
    "cumsum-bool": (BOOLS, "aten.cumsum(%a) {dim = -1}"),
    "var-all": (X, "aten.var.correction(%x)"),
    "std": (X, "aten.std.correction(%x) {dim = [1], correction = 0}"),
    "var": (X, "aten.var.correction(%x) {dim = [-1], correction = 0, keepdim = true}"),
    "prod": (X, "aten.prod.dim_int(%x) {dim = -1}"),
    "logsumexp": (X, "aten.logsumexp(%x) {dim = [-1]}"),
    # normalisers
    "softmax": (X, "aten.softmax.int(%x) {dim = -1}"),
    "softmax-axis": (X, "aten.softmax.int(%x) {dim = 1}"),
    "softmax-dtype": (
        "  input %x : f16[batch, seq]\n",
        "aten.softmax.int(%x) {dim = -1, dtype = f32}",
    ),
    "log-softmax": (X, "aten.log_softmax.int(%x) {dim = -1}"),
    # creation
    "arange": (X, "aten.arange() {end = seq}"),
    "arange-start": (X, "aten.arange.start() {start = 2, end = seq + 3}"),
    "arange-step": (X, "aten.arange.start_step() {start = 0, end = 2 * seq, step = 2}"),
    "arange-float": (X, "aten.arange() {end = seq, dtype = f32}"),
    "arange-static": (X, "aten.arange.start_step() {start = 0, end = 8, step = 2, dtype = i64}"),
    "full": (X, "aten.full() {size = [batch, seq], fill_value = -inf, dtype = f32}"),
    "full-static": (X, "aten.full() {size = [2, 3], fill_value = 7}"),
    "full-dim": (X, "aten.full() {size = [3], fill_value = seq}"),
    "zeros": (X, "aten.zeros() {size = [batch, 1], dtype = bool}"),
    "ones-like": (INTS, "aten.ones_like(%i) {dtype = f32}"),
    "full-like": (X, "aten.full_like(%x) {fill_value = 3}"),
    "new-ones": (X, "aten.new_ones(%x) {size = [seq, seq]}"),
    "tril": (X, "aten.tril(%x) {diagonal = -1}"),
    "tril-bytes": ("  input %a : u8[seq, keys]\n", "aten.tril(%a) {diagonal = 0}"),
    "triu-bool": ("  input %a : bool[seq, keys]\n", "aten.triu(%a) {diagonal = 1}"),
    "triu-by-dim": ("  input %x : f32[seq, keys]\n", "aten.triu(%x) {diagonal = keys - seq + 1}"),
    "scalar-tensor": (X, "aten.scalar_tensor() {s = 1.5, dtype = f32}"),
    "eye": (X, "aten.eye() {n = seq}"),
    "eye-bool": (X, "aten.eye.m() {n = seq, m = 4, dtype = bool}"),
    "linspace": (X, "aten.linspace() {start = 0.0, end = 1.0, steps = 5}"),
    # gathers
    "embedding": ("  input %w : f32[5, 8]\n" + INTS, "aten.embedding(%w, %i)"),
    "index": (X + "  input %k : i64[3]\n", "aten.index.Tensor(%x, none, none, %k)"),
    "index-select": (X + "  input %k : i64[3]\n", "aten.index_select(%x, %k) {dim = 2}"),
    "gather": (X + "  input %k : i64[batch, seq, 2]\n", "aten.gather(%x, %k) {dim = 2}"),
    "scatter": (
        X + "  input %k : i64[batch, 1, 3]\n",
        "aten.scatter.value(%x, %k) {dim = 2, value = 9.0}",
    ),
    "index-add": (
        XY + "  input %k : i64[8]\n",
        "aten.index_add(%x, %k, %y) {dim = -1, alpha = 2}",
    ),
    "bf16": (
        X + "  %n = aten._to_copy(%x) {dtype = bf16}\n  %p = aten.mul.Tensor(%n, %n)\n",
        "aten._to_copy(%p) {dtype = f32}",
    ),
    "topk": (X, "aten.max.dim(%x) {dim = -1}"),
    # casts
    "to": (X, "aten._to_copy(%x) {dtype = i64}"),
    "to-bool": (INTS, "aten.to.dtype(%i) {dtype = bool}"),
    "to-same": (X, "aten.to.dtype(%x) {dtype = f32}"),
    "dropout": (X, "aten.dropout(%x) {p = 0.1, train = false}"),
    # products
    "matmul": (XY, "aten.einsum(%x, %y) {equation = \"bsd, btd -> bst\"}"),
    "einsum-ellipsis": (XY, 'aten.einsum(%x, %y) {equation = "...sd,...td->...st"}'),
}  # fmt: skip


@pytest.mark.parametrize("name", UNARY)
def test_unary(name: str) -> None:
    check(f"{X}  %r = aten.{name}(%x)\n  return %r")


@pytest.mark.parametrize("name", ["sqrt", "rsqrt", "log", "log1p"])
def test_unary_of_positive(name: str) -> None:
    check(f"{X}  %p = aten.square(%x)\n  %r = aten.{name}(%p)\n  return %r")


@pytest.mark.parametrize("name", CASES)
def test_op(name: str) -> None:
    inputs, call = CASES[name]
    results = "%r, %s" if name == "topk" else "%r"
    check(f"{inputs}  {results} = {call}\n  return {results}")


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        ("aten.split.Tensor(%x) {split_size = 3, dim = 2}", 3),
        ("aten.split_with_sizes(%x) {split_sizes = [1, 2, 5], dim = -1}", 3),
        ("aten.chunk(%x) {chunks = 3, dim = -1}", 3),
        ("aten.unbind.int(%x) {dim = 2}", 8),
        ("aten.chunk(%x) {chunks = 1, dim = -1}", 1),
    ],
)
def test_op_with_several_outputs(call: str, parts: int) -> None:
    names = ", ".join(f"%p{i}" for i in range(parts))
    check(f"{X}  {names} = {call}\n  return {names}")


HF_MASK = """
  input %mask : bool[batch, keys]
  %b = aten.arange() {end = batch}
  %b4 = aten.view(%b) {size = [batch, 1, 1, 1]}
  %k = aten.arange() {end = keys}
  %r = aten.index.Tensor(%mask, %b4, %k)
  return %r
"""


@pytest.mark.parametrize(
    "body",
    [
        HF_MASK,
        "  input %x : f32[2, 3, 4, 5]\n  input %i : i64[3]\n  input %j : i64[2, 1]\n"
        "  %a = aten.remainder.Scalar(%i) {other = 3}\n"
        "  %b = aten.remainder.Scalar(%j) {other = 4}\n"
        "  %r = aten.index.Tensor(%x, none, %a, %b)\n"
        "  %c = aten.remainder.Scalar(%i) {other = 2}\n"
        "  %s = aten.index.Tensor(%x, %c, none, %b)\n  return %r, %s",
    ],
    ids=["hf-padding-mask", "adjacent-and-apart"],
)
def test_several_indices_broadcast(body: str) -> None:
    check(body)


def test_norms_over_axes_of_any_size() -> None:
    check(
        f"{X}"
        "  %r = aten.layer_norm(%x) {normalized_shape = [seq, 8], eps = 0.0009765625}\n"
        "  %t = aten.transpose.int(%x) {dim0 = -1, dim1 = -2}\n"
        "  %n = aten.layer_norm(%t) {normalized_shape = [seq], eps = 0.0009765625}\n"
        "  %m = aten.rms_norm(%t) {normalized_shape = [seq], eps = 0.0009765625}\n"
        "  %o, %s = attn.skip_layer_norm(%t, %t) {eps = 0.0009765625}\n"
        "  return %r, %n, %m, %o, %s",
    )


def test_a_size_known_only_at_run_time() -> None:
    check(
        "  input %x : i64[seq]\n  input %t : f32[8, 3]\n"
        "  %m = aten.max(%x)\n  %u = aten.item(%m) : int(u0)\n"
        "  %r = aten.arange() {end = u0 + 1} : i64[u0 + 1]\n  return %r"
    )


def test_a_bool_index_keeps_the_true_rows() -> None:
    check(
        "  input %x : f32[batch, seq, 3]\n  input %m : bool[batch, seq]\n"
        "  %r = aten.index.Tensor(%x, %m)\n  return %r"
    )


@pytest.mark.parametrize("indices", ["%m", "none, %m", "none, none, %m"])
def test_a_bool_index_of_one_axis_may_be_on_any(indices: str) -> None:
    """As `edge_index[:, mask]` keeps some edges of a graph."""
    check(
        "  input %x : f32[seq, seq, seq, 3]\n  input %m : bool[seq]\n"
        f"  %r = aten.index.Tensor(%x, {indices})\n  return %r"
    )


@pytest.mark.parametrize(
    "body",
    [
        "  input %x : i64[batch, seq]\n  input %p : i64[batch, 1]\n"
        "  %r = aten.diff(%x, %p) {dim = -1} : i64[batch, seq]\n  return %r",
        "  input %x : f32[seq]\n  input %y : f32[8]\n"
        "  %r = aten.outer(%x, %y) : f32[seq, 8]\n  return %r",
        f"{X}  %r = aten.norm.ScalarOpt_dim(%x) {{p = 2, dim = [-1]}} : f32[batch, seq]\n"
        "  return %r",
        "  input %x : i64[batch, seq]\n"
        "  %r = aten.one_hot(%x) {num_classes = 5} : i64[batch, seq, 5]\n  return %r",
        "  input %x : f32[batch, 4, 6, 6]\n  parameter %w : f32[4]\n"
        "  %r = aten.group_norm(%x, %w) {num_groups = 2} : f32[batch, 4, 6, 6]\n  return %r",
        "  input %x : f32[batch, seq]\n  %b = aten.arange() {end = 4, dtype = f32} : f32[4]\n"
        "  %r = aten.bucketize.Tensor(%x, %b) {right = true} : i64[batch, seq]\n  return %r",
    ],
    ids=["diff", "outer", "norm", "one_hot", "group_norm", "bucketize"],
)
def test_a_composite_op_is_lowered_by_its_parts(body: str) -> None:
    check(body, {"w": torch.randn(4)})


def test_a_quotient_of_a_size_may_be_zero() -> None:
    """At seq = 1 and keys = 3; behind the input's axes, a 0 was one that the operator lacks."""
    check(
        "  input %x : f32[batch, seq, keys]\n"
        "  %a = aten.slice.Tensor(%x) {dim = 1, end = seq // 4}"
        " : f32[batch, seq // 4, keys]\n"
        "  %b = aten.slice.Tensor(%a) {dim = 2, end = keys // 4}"
        " : f32[batch, seq // 4, keys // 4]\n"
        "  %c = aten.reshape(%b) {shape = [batch * (seq // 4) * (keys // 4)]}"
        " : f32[batch*(seq // 4)*(keys // 4)]\n"
        "  %y = aten.reshape(%c) {shape = [batch, seq // 4, keys // 4]}"
        " : f32[batch, seq // 4, keys // 4]\n"
        "  return %y"
    )
