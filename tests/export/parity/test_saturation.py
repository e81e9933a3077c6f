"""Gates of which most are shut: what a kernel's sigmoid costs passes, and nothing else does."""

from __future__ import annotations

import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn

from attngraph.export.parity.budget import FACTOR, compare
from attngraph.export.parity.nudging import REPEATED, is_proportional
from attngraph.export.parity.reference import Reference
from attngraph.export.parity.saturation import BOUNDED

EPS = torch.finfo(torch.float32).eps


class Shut(nn.Module):
    """About 2⁻²⁰ in most features and 1/2 in the last, by a sigmoid or by an exponential."""

    def __init__(self, *, gated: bool) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.tensor([-14.0] * 7 + [0.0]))
        self.gated = gated

    def forward(self, x: Tensor) -> Tensor:
        moved = x / 8 + self.offset
        return moved.sigmoid() if self.gated else moved.exp() / 2


@pytest.mark.parametrize(
    ("gated", "off", "passes"),
    [
        (True, EPS, True),
        (True, 8 * EPS, False),
        (False, EPS, False),
        (False, EPS / 2**26, True),
    ],
)
def test_a_gate_may_be_off_by_eps_of_its_range(gated: bool, off: float, passes: bool) -> None:
    torch.manual_seed(0)
    x, module = torch.randn(64, 8), Shut(gated=gated)
    reference = Reference(module, precision="fp32")((x,))
    sign = torch.where(torch.rand(64, 8) > 0.5, off, -off)
    candidate = reference.eager[0] + torch.where(reference.eager[0] < 0.1, sign, 0.0)
    assert compare(reference, [candidate], "fp32").passed is passes


def test_a_branch_is_not_proportional() -> None:
    """What a comparison makes of a gate's noise is no rounding: it is as large for less noise."""
    whole = torch.tensor([[1e-7, -2e-7], [1.0, 1.0]])
    assert is_proportional(whole, whole / 16).tolist() == [[True], [True]]
    part = torch.tensor([[1e-7 / 16, -2e-7 / 16], [1.0, 0.0]])
    assert is_proportional(whole, part).tolist() == [[True], [False]]


def test_noise_of_gates_is_cut_as_the_outputs_are() -> None:
    module, x = nn.Sequential(nn.Linear(4, 4), nn.GLU()).requires_grad_(False), torch.randn(6, 4)
    cut = Reference(module, precision="fp32")((x,)).cut(lambda run: (run[0][:2],))
    pairs = cut.gates()
    assert all(each.shape == (2, 2) for pair in pairs for (each,) in pair)
    assert all(bool((whole[0] != cut.exact[0]).any()) for whole, _ in pairs)
    assert cut.sample()[0][0].shape == (2, 2)


class Creeping(nn.Module):
    """A state that hardly moves: in each step a kernel's tanh is off alike, by `off`."""

    def __init__(self, off: float) -> None:
        super().__init__()
        self.off = off

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        for t in range(x.shape[1]):
            state = torch.tanh(state + x[:, t] / 256) + self.off
        return state


@pytest.mark.parametrize(
    ("off", "passes"), [(0.3 * EPS, True), (-0.3 * EPS, True), (8 * EPS, False)]
)
def test_what_a_kernel_repeats_in_each_step_adds_up(off: float, passes: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 200, 8)
    reference = Reference(Creeping(0.0), precision="fp32")((x,))
    candidate = Creeping(off).double()(x.double()).float()
    parity = compare(reference, [candidate], "fp32")
    assert parity.passed is passes
    assert parity.saturated


@pytest.mark.parametrize("name", ["Tanh", "Sigmoid", "Sin", "Cos"])
def test_the_slack_is_that_of_the_kernel(name: str) -> None:
    """What onnxruntime's function is off by, on the CPU at hand: no more than the budget takes, and
    not far less; so is what it is off by alike, in 4,000 numbers next to each other."""
    x = torch.linspace(0.01, 4, 400_000)
    inputs, outputs = (
        [helper.make_tensor_value_info(each, TensorProto.FLOAT, [None])] for each in ("x", "y")
    )
    graph = helper.make_graph([helper.make_node(name, ["x"], ["y"])], name, inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    found = torch.from_numpy(session.run(None, {"x": x.numpy()})[0]).double()
    off = found - getattr(torch, name.lower())(x.double())
    slack = EPS * float(BOUNDED[name.lower()](None, (x[:1],), {}).at_most)
    assert slack / 8 <= off.abs().max() <= FACTOR["fp32"] * slack
    assert off.unflatten(0, (100, -1)).mean(1).abs().max() <= FACTOR["fp32"] * REPEATED * slack
