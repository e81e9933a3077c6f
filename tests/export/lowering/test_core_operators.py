"""Every ATen operator with torch's `core` tag has a lowering, or its reason here."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import attngraph
from attngraph.export.lowering import find_lowering, registered
from attngraph.export.lowering.fallback.formulas import FORMULAS
from attngraph.ir.ops import op_name

WITHOUT = {
    "a gradient, which no model at inference computes": {
        "aten._adaptive_avg_pool2d_backward",
        "aten.avg_pool2d_backward",
        "aten.convolution_backward",
        "aten.embedding_dense_backward",
        "aten.max_pool2d_with_indices_backward",
        "aten.native_group_norm_backward",
        "aten.native_layer_norm_backward",
    },
    "about sizes, which are expressions in the graph": {
        "aten.sym_is_contiguous",
        "aten.sym_numel",
        "aten.sym_stride.int",
    },
    "a change in place, which functionalization takes out, or no trace takes": {"aten.resize_"},
    "a form with out=, which functionalization replaces": {"aten.atan2.out"},
    "what torch decomposes, as below": {"aten._adaptive_avg_pool2d"},
    "matrix products in the graph (passes/canonical/fourier.py)": {"aten._fft_c2r"},
}


def core() -> set[str]:
    """Those that torch knows; `dir(torch.ops.aten)` has only what was asked for before."""
    found = set()
    for full in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full.partition("::")
        packet, _, overload = name.partition(".")
        if namespace == "aten":
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            found |= {op_name(op)} if torch.Tag.core in op.tags else set()
    return found


def test_every_core_operator_has_a_lowering_or_a_reason() -> None:
    names = core()
    assert len(names) > 150
    missing = {
        name
        for name in names
        if registered(name) is None and name not in FORMULAS and find_lowering(name) is None
    }
    assert missing == names & set().union(*WITHOUT.values())


class Irfft(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * 2, n=x.shape[-1])


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.AdaptiveAvgPool1d(4), (2, 3, 12)),
        (nn.AdaptiveAvgPool2d((2, 3)), (2, 3, 8, 9)),
        (nn.AdaptiveAvgPool2d((3, 2)), (2, 3, 8, 7)),
        (Irfft(), (2, 3, 12)),
    ],
    ids=["pool 1d", "pool 2d", "pool 2d unevenly", "irfft"],
)
def test_what_has_none_of_its_own_compiles(module: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    torch.testing.assert_close(attngraph.optimize(module.eval(), (x,))(x), module(x))
