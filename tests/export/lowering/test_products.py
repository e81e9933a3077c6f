"""Products, norms and sums compute what the interpreter computes, and as exactly."""

from __future__ import annotations

import pytest
import torch

from tests.export.lowered import SIZES, check, op_types, run, session_of

X = "  input %x : f32[batch, seq, 8]\n"


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("bias", ["", ", %b"])
@pytest.mark.parametrize("shape", ["8", "seq, 8", "batch, seq, 8", "batch, 2, seq, 8"])
def test_linear(dtype: str, bias: str, shape: str) -> None:
    weights = {"w": torch.randn(6, 8), "b": torch.randn(6)}
    weights = {k: v.double() if dtype == "f64" else v for k, v in weights.items()}
    check(
        f"  input %x : {dtype}[{shape}]\n  parameter %w : {dtype}[6, 8]\n"
        f"  parameter %b : {dtype}[6]\n  %r = aten.linear(%x, %w{bias})\n  return %r",
        weights,
    )


@pytest.mark.parametrize("beta", [1, 0, 0.5])
def test_weighted_products(beta: float) -> None:
    attrs = f"{{beta = {beta}, alpha = 0.25}}"
    check(
        "  input %c : f32[batch, seq, keys]\n  input %q : f32[batch, seq, 8]\n"
        f"  input %k : f32[batch, 8, keys]\n  %r = aten.baddbmm(%c, %q, %k) {attrs}\n  return %r"
    )
    check(
        "  input %c : f32[keys]\n  input %q : f32[seq, 8]\n  input %k : f32[8, keys]\n"
        f"  %r = aten.addmm(%c, %q, %k) {attrs}\n  return %r"
    )


def test_patch_embedding() -> None:
    weights = {"w": torch.randn(6, 3, 4, 4), "b": torch.randn(6)}
    check(
        "  input %x : f32[batch, 3, 8, 8]\n"
        "  parameter %w : f32[6, 3, 4, 4]\n  parameter %b : f32[6]\n"
        "  %r = aten.conv2d(%x, %w, %b) {stride = [4, 4]}\n"
        '  %s = aten.conv2d.padding(%x, %w, %b) {padding = "same"}\n  return %r, %s',
        weights,
    )


@pytest.mark.parametrize("affine", ["", ", %w", ", %w, %b"])
def test_layer_norm(affine: str) -> None:
    weights = {"w": torch.randn(8), "b": torch.randn(8)}
    check(
        f"{X}  parameter %w : f32[8]\n  parameter %b : f32[8]\n"
        f"  %r = aten.layer_norm(%x{affine}) {{normalized_shape = [8], eps = 0.0009765625}}\n"
        "  return %r",
        weights,
    )


@pytest.mark.parametrize("dtype", ["f32", "f16", "f64"])
def test_norms_with_a_residual(dtype: str) -> None:
    torch_dtype = {"f32": torch.float32, "f16": torch.float16, "f64": torch.float64}[dtype]
    weights = {name: torch.randn(8).to(torch_dtype) for name in "wbc"}
    vectors = "".join(f"  parameter %{name} : {dtype}[8]\n" for name in "wbc")
    check(
        f"  input %x : {dtype}[batch, seq, 8]\n  input %y : {dtype}[batch, seq, 8]\n{vectors}"
        "  %n, %s = attn.skip_layer_norm(%x, %y, %w, %b, %c) {eps = 0.0009765625}\n"
        "  %m, %t = attn.skip_rms_norm(%x, %y, %w) {eps = 0.0009765625}\n"
        "  %o = attn.rms_norm(%x, %w) {eps = 0.0009765625}\n"
        "  %p = attn.rms_norm(%x) {eps = 0.0009765625}\n"
        "  return %n, %s, %m, %t, %o, %p",
        weights,
    )


def test_a_wide_weight_multiplies_after_the_norm() -> None:
    check(
        "  input %x : f16[batch, seq, 8]\n  parameter %w : f32[8]\n"
        "  %r = attn.rms_norm(%x, %w) {eps = 0.0009765625}\n  return %r",
        {"w": torch.randn(8)},
    )


@pytest.mark.parametrize(
    ("equation", "sizes", "kept"),
    [
        ("bihd,bjhd->jbhi", "4, 2", "seq - 1, batch, 4, seq - 1"),
        ("bihd,cjhe->bcdije", "4, 2", "batch, batch, 2, seq - 1, seq - 1, 2"),
        ("bihd,bihe->ihbde", "4, 2", "seq - 1, 4, batch, 2, 2"),
        ("bihd,bihe->de", "4, 2", "2, 2"),
    ],
)
def test_an_einsum_of_what_may_be_empty_is_a_product(equation: str, sizes: str, kept: str) -> None:
    """onnxruntime's own kernel divides by some of the sizes; torch's parts ask for them."""
    shape = f"batch, seq - 1, {sizes}"
    model = check(
        f"  input %x : f32[batch, seq, {sizes}]\n"
        f"  %y = aten.slice.Tensor(%x) {{dim = 1, start = 1}} : f32[{shape}]\n"
        f'  %r = aten.einsum(%y, %y) {{equation = "{equation}"}} : f32[{kept}]\n  return %r',
        sizes=[*SIZES, {"batch": 3, "seq": 2, "keys": 1}],
    )
    assert "Einsum" not in op_types(model)


@pytest.mark.parametrize(
    ("equation", "kept"),
    [
        ("...b,...c->bc", "4, 4"),
        ("...b,...b->...", "batch, seq"),
        ("b...,...c->c", "4"),
        ("...a,...c", "batch, seq, 4, 4"),
    ],
)
def test_dots_of_an_einsum_are_letters(equation: str, kept: str) -> None:
    """onnxruntime's kernel refuses those that the result lacks; torch sums over them."""
    is_matrix = equation.startswith("b...")
    first, other = ("4, batch", "batch, 4") if is_matrix else ("batch, seq, 4", "batch, seq, 4")
    check(
        f"  input %x : f32[{first}]\n  input %y : f32[{other}]\n"
        f'  %r = aten.einsum(%x, %y) {{equation = "{equation}"}} : f32[{kept}]\n  return %r'
    )


def test_a_multiple_of_a_window_has_one() -> None:
    model = check(
        "  require seq % 4 == 0\n  input %x : f32[batch, seq, 2]\n"
        "  %y = aten.reshape(%x) {shape = [batch, seq // 4, 8]} : f32[batch, seq // 4, 8]\n"
        '  %r = aten.einsum(%y, %y) {equation = "bid,bjd->bij"} : '
        "f32[batch, seq // 4, seq // 4]\n  return %r",
        sizes=[{"batch": 2, "seq": 4, "keys": 1}, {"batch": 2, "seq": 12, "keys": 1}],
    )
    assert "Einsum" in op_types(model)


LONG = """
  input %x : f32[batch, 2, 8000]
  %y = aten.{op}(%x) {{dim = [1, 2]{more}}}
  return %y"""


@pytest.mark.parametrize(
    ("op", "more"),
    [("sum.dim_IntList", ""), ("mean.dim", ""), ("std.correction", ", keepdim = true")],
)
def test_a_long_sum_is_as_exact_as_a_short_one(op: str, more: str) -> None:
    """In running sums of 16,000 equal terms each rounding errs to the same side."""
    model = check(LONG.format(op=op, more=more))
    assert op_types(model).count("Reshape") == (2 if "std" in op else 1)
    x = torch.full((3, 2, 8000), 1.1)
    x[:, 0] = 1.0 if "std" in op else 1.1
    (found,) = run(session_of(model), (x,))
    exact = getattr(torch, op.split(".")[0])(x.double(), dim=(1, 2), keepdim=bool(more))
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)


def test_a_short_or_open_sum_stays_one() -> None:
    for shape in ("batch, 2, 2000", "batch, 2, seq", "batch, 1, 4099"):
        model = check(f"""
  input %x : f32[{shape}]
  %y = aten.sum.dim_IntList(%x) {{dim = [1, 2]}}
  return %y""")
        assert op_types(model) == ["ReduceSum"]
