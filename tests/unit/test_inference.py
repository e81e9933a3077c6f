"""A module is as it was after a run at inference, whatever it set on the way."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from attngraph.inference import inference


class Remembers(nn.Module):
    """Keeps a table for the next call, and replaces a buffer."""

    rates: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rates", torch.ones(3), persistent=False)
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.table = x.sum(0)
        self.last = self.table
        self.rates = self.rates + self.table
        return x * self.rates


def test_what_a_model_sets_as_it_runs_is_as_before() -> None:
    part = Remembers()
    module, rates = nn.Sequential(part), part.rates
    with inference(module):
        module(torch.ones(2, 3))
        assert part.table is not None
    assert part.table is None
    assert not hasattr(part, "last")
    assert part.rates is rates


def test_an_error_leaves_the_module_as_it_was_too() -> None:
    part = Remembers()
    part.train()
    try:
        with inference(part):
            assert not part.training
            part(torch.ones(2, 3))
            raise ValueError
    except ValueError:
        pass
    assert part.training
    assert part.table is None


def test_the_fast_path_is_off_until_the_last_one_leaves() -> None:
    first, second = inference(Remembers()), inference(Remembers())
    enabled = torch.backends.mha.get_fastpath_enabled()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not torch.backends.mha.get_fastpath_enabled()
    second.__exit__(None, None, None)
    assert torch.backends.mha.get_fastpath_enabled() == enabled


class Frozen(OrderedDict[str, int]):
    """A configuration that can't be written to, as diffusers has."""

    def update(self, *given: object, **named: object) -> None:
        raise TypeError("a frozen configuration")

    def __setitem__(self, name: str, value: int) -> None:
        if hasattr(self, "closed"):
            raise TypeError("a frozen configuration")
        super().__setitem__(name, value)


def test_a_mapping_that_refuses_to_be_written_to_stays() -> None:
    module = Remembers()
    module.config = Frozen(width=3)
    module.config.closed = True
    with inference(module):
        OrderedDict.__setitem__(module.config, "width", 4)
        OrderedDict.__setitem__(module.config, "more", 5)
    assert dict(module.config) == {"width": 3}
