"""An outer product of two dtypes, as positions in whole numbers times frequencies are."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.export import Dim

from attngraph import optimize


class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        return x * torch.einsum("i,j->ij", places, self.frequencies).cos()


def test_an_outer_product_of_two_dtypes_is_computed_in_that_of_its_result() -> None:
    model = Rotated().eval()
    optimized = optimize(model, (torch.randn(2, 9, 4),), dynamic_shapes=({1: Dim("length")},))
    x = torch.randn(2, 5, 4)
    torch.testing.assert_close(optimized(x), model(x), atol=1e-6, rtol=1e-5)
