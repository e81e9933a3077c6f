"""Which graphs compute with denormal numbers: what is written so, and quotients of exponentials."""

from __future__ import annotations

import pytest

from attngraph.analysis.values.denormals import denormal_at
from attngraph.ir import parse

_GRAPH = """
graph @main {{
  input %x : f32[4, 6]
{lines}
  return %y
}}
"""
_SUM = "%s = aten.sum.dim_IntList(%e) {dim = [-1], keepdim = true}"


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["%y = aten.add.Scalar(%x) {other = 1e-45}"], "aten.add.Scalar"),
        (["%y = aten.add.Scalar(%x) {other = 1e-30}"], ""),
        (["%e = aten.exp(%x)", _SUM, "%y = aten.div.Tensor(%e, %s)"], "aten.div.Tensor"),
        (
            [
                "%m = aten.amax(%x) {dim = [-1], keepdim = true}",
                "%d = aten.sub.Tensor(%x, %m)",
                "%e = aten.exp(%d)",
                _SUM,
                "%y = aten.div.Tensor(%e, %s)",
            ],
            "",  # the sum is 1 or more
        ),
        (["%e = aten.exp(%x)", _SUM, "%y = aten.mul.Tensor(%e, %s)"], ""),
        (
            [
                "%e = aten.exp(%x)",
                _SUM,
                "%t = aten.add.Scalar(%s) {other = 1e-6}",
                "%y = aten.div.Tensor(%e, %t)",
            ],
            "",  # nor is this less than 1e-6
        ),
        (["%e = aten.sigmoid(%x)", _SUM, "%y = aten.div.Tensor(%e, %s)"], ""),
    ],
)
def test_a_quotient_of_sums_that_may_all_be_denormal(lines: list[str], found: str) -> None:
    node = denormal_at(parse(_GRAPH.format(lines="\n".join(f"  {line}" for line in lines))))
    assert (node.op if node else "") == found
