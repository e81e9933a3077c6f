"""A recurrence with two keys runs in chunks, or token by token, in products of matrices."""

from __future__ import annotations

import pytest

from tests.export.lowered import check, op_types

DECAYS = {
    "none": "",
    "heads": "%t = aten.sigmoid(%x)\n  %g = aten.mul.Scalar(%t) {other = -40.0}",
    "heads that may be 0": "%t = aten.mul.Scalar(%x) {other = 8.0}\n"
    "  %e = aten.hardsigmoid(%t)\n  %g = aten.log(%e)",
    "features": "%t = aten.sigmoid(%w)\n  %g = aten.mul.Scalar(%t) {other = -0.6}",
    "their logarithms": "%t = aten.sigmoid(%w)\n  %n = aten.mul.Scalar(%t) {other = -0.6}\n"
    "  %e = aten.exp(%n)\n  %g = aten.log(%e)",
    "steep features": "%t = aten.sigmoid(%w)\n  %g = aten.mul.Scalar(%t) {other = -3.0}",
    "growing heads": "%g = aten.mul.Scalar(%x) {other = 0.1}",
}
IN_CHUNKS = ("none", "heads", "heads that may be 0", "features", "their logarithms")
_SIZES = [{"batch": 2, "seq": seq, "keys": 1} for seq in (1, 2, 8, 9, 16, 17, 40)]


def _unit(name: str, of: str, length: str) -> str:
    """Each head's numbers divided by their norm."""
    heads = f"[batch, {length}, 2, 4]"
    return f"""%{of}h = aten.reshape(%{of}) {{shape = {heads}}}
  %{of}n = aten.linalg_vector_norm(%{of}h) {{dim = [-1], keepdim = true}}
  %{of}m = aten.clamp_min(%{of}n) {{min = 1e-12}}
  %{of}e = aten.expand(%{of}m) {{size = {heads}}}
  %{of}u = aten.div.Tensor(%{of}h, %{of}e)
  %{name} = aten.reshape(%{of}u) {{shape = [batch, {length}, 8]}}"""


def _body(length: str, decays: str, past: bool, dtype: str = "f32", turn: float = 2.0) -> str:
    operands = f"{'%s' if past else 'none'}, {'none' if decays == 'none' else '%g'}"
    rows = f"{dtype}[batch, {length}"
    return f"""
  input %q : {rows}, 8]
  input %k : {rows}, 8]
  input %v : {rows}, 12]
  input %c : {rows}, 8]
  input %d : {rows}, 8]
  input %s : {dtype}[batch, 2, 4, 6]
  input %x : {rows}, 2]
  input %w : {rows}, 8]
  {_unit("a", "c", length)}
  {_unit("p", "d", length)}
  %b = aten.mul.Scalar(%p) {{other = {-turn}}}
  {DECAYS[decays]}
  %y, %z = attn.generalized_delta_rule(%q, %k, %v, %a, %b, {operands}) {{heads = 2, scale = -0.5}}
  return %y, %z, %s, %x, %w"""


@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("decays", DECAYS)
@pytest.mark.parametrize("length", ["1", "5", "16", "33", "seq"])
def test_it_is_the_recurrence(length: str, decays: str, past: bool) -> None:
    model = check(_body(length, decays, past), sizes=_SIZES)
    operators = op_types(model)
    assert ("If" in operators) == (length == "seq")
    if length != "seq":
        assert ("Scan" in operators) == (length != "1")
    in_chunks = length in ("16", "33") and decays in IN_CHUNKS
    assert ("Slice" in operators) == in_chunks


@pytest.mark.parametrize("dtype", ["f64", "f16"])
@pytest.mark.parametrize("decays", ["heads", "features", "steep features"])
def test_other_dtypes(dtype: str, decays: str) -> None:
    check(_body("seq", decays, True, dtype), sizes=_SIZES)


def test_keys_that_make_a_state_grow_are_read_token_by_token() -> None:
    """Errors of a chunk grow as its state does."""
    model = check(_body("33", "none", False, turn=2.1), sizes=_SIZES)
    assert "Scan" in op_types(model)
    assert "Slice" not in op_types(model)
