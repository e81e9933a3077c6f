"""Masks and positions that numpy computes for a size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.export import Dim

import attngraph
from attngraph.errors import CaptureError
from tests.models.attends import Attends

pytestmark = pytest.mark.wide

NAMED = ({0: Dim("batch"), 1: Dim("length")},)
AUTO = ({0: Dim.AUTO, 1: Dim.AUTO},)


class Subsequent(Attends):
    def forward(self, x: Tensor) -> Tensor:
        shape = (1, x.shape[1], x.shape[1])
        ahead = np.triu(np.ones(shape), k=1).astype("uint8")
        return self.attend(x, torch.from_numpy(ahead) != 0)


class Tensored(Attends):
    def forward(self, x: Tensor) -> Tensor:
        seen = torch.tensor(np.tril(np.ones((x.size(1), x.size(1)))))
        return self.attend(x, ~seen.bool())


class Compared(Attends):
    def forward(self, x: Tensor) -> Tensor:
        place = np.arange(x.size(1))
        return self.attend(x, torch.from_numpy(place[:, None] < place[None]))


class Sinusoids(Attends):
    def forward(self, x: Tensor) -> Tensor:
        length, width = x.shape[1:]
        angle = np.arange(length)[:, None] / np.power(10000, 2 * (np.arange(width) // 2) / width)
        angle[:, 0::2] = np.sin(angle[:, 0::2])
        angle[:, 1::2] = np.cos(angle[:, 1::2])
        hidden = torch.zeros(length, length, dtype=torch.bool)
        return self.attend(x + torch.from_numpy(angle).float(), hidden)


class Near(Attends):
    """numpy makes objects of numbers that it doesn't know."""

    def forward(self, x: Tensor) -> Tensor:
        place = np.arange(x.size(1))
        apart = np.clip(place[None] - place[:, None], -4, 4) % 3
        phase = np.minimum(place, 5) / 10.0
        hidden = torch.from_numpy(apart) == 2
        return self.attend(x + torch.from_numpy(phase).float()[:, None], hidden)


@pytest.mark.parametrize("kind", [Subsequent, Tensored, Compared, Sinusoids, Near])
@pytest.mark.parametrize("shapes", [NAMED, AUTO], ids=["named", "auto"])
def test_numpy_computes_for_any_size(kind: type[Attends], shapes: Any) -> None:
    module = kind().eval()
    optimized = attngraph.optimize(module, (torch.randn(2, 7, 16),), dynamic_shapes=shapes)
    assert [site.status for site in optimized.report.sites] == ["fused"]
    for batch, length in ((1, 1), (2, 3), (3, 12)):
        x = torch.randn(batch, length, 16)
        with torch.no_grad():
            torch.testing.assert_close(optimized(x), module(x))


class Sorted(Attends):
    """A function of numpy that has no counterpart among torch's."""

    def forward(self, x: Tensor) -> Tensor:
        order = torch.from_numpy(np.lexsort((np.ones(x.shape[1]),)))
        return x[:, order] * 2


def test_what_torch_has_no_function_for_names_its_line() -> None:
    sample = (torch.randn(2, 7, 16),)
    with pytest.raises(CaptureError, match=r"np\.lexsort"):
        attngraph.optimize(Sorted().eval(), sample, dynamic_shapes=NAMED)


def test_an_axis_stays_as_it_is_where_the_model_allows_no_other() -> None:
    module = Sorted().eval()
    optimized = attngraph.optimize(module, (torch.randn(2, 7, 16),), dynamic_shapes=AUTO)
    assert any("stays 7" in note and "np.lexsort" in note for note in optimized.report.notes)
    x = torch.randn(5, 7, 16)
    torch.testing.assert_close(optimized(x), module(x))
