"""A model that amplifies what is reassociated is compiled as with --exact, and a note says why."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph


class Added(nn.Module):
    """Scores of 30 to 100, which beside -1e9 count by 64 in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape) * 2)

    def hide(self, scores: Tensor, mask: Tensor) -> Tensor:
        return scores + (1.0 - mask.to(scores.dtype)) * -1e9

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.hide(q @ k.mT, mask[:, None]).softmax(-1) @ v


def test_what_only_the_model_itself_computes_is_compiled_exactly() -> None:
    torch.manual_seed(0)
    module = Added().eval()
    args = torch.randn(2, 6, 8), torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    dims = {0: Dim("batch"), 1: Dim("length", max=64)}
    found = attngraph.optimize(module, args, dynamic_shapes=(dims, dims))
    assert found.report.parity.passed
    (note,) = [note for note in found.report.notes if "as with --exact" in note]
    assert "out of its error budget with what drop-key-bias" in note
    assert not found.report.reassociated
    hidden = args[0], torch.zeros(2, 6, dtype=torch.int64)
    torch.testing.assert_close(found(*hidden), module(*hidden), rtol=1e-5, atol=1e-5)
