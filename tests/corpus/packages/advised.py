"""Rows of other files that are refused or fixed, with what the sentence there advises done.

They show that the advice helps; no package counts them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.corpus.packages.kit import ADVISED, find, first_of_equals, images, row


class _Torch:
    """The module torch, with functions of ours."""

    def __init__(self, **own: Any) -> None:
        self.__dict__.update(own)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Drawn(torch.nn.Module):
    """A model with the noise that it drew as an input; `noise` takes it to where it was drawn."""

    def __init__(self, model: torch.nn.Module, noise: list[torch.Tensor]) -> None:
        super().__init__()
        self.model, self._noise = model, noise

    def forward(self, inputs: Any, noise: torch.Tensor) -> Any:
        self._noise[:] = [noise]
        try:
            return self.model(**inputs) if isinstance(inputs, dict) else self.model(inputs)
        finally:
            self._noise.clear()


def _of(label: str) -> tuple[Any, Callable[[int, int], Any]]:
    model, inputs = find(label).make()
    return model, inputs


@row(f"slot-attention multi-head{ADVISED}")
def _slots() -> Any:
    from slot_attention import multi_head_slot_attention as slots

    noise: list[torch.Tensor] = []
    model, inputs = _of("slot-attention multi-head")
    vars(slots).update(torch=_Torch(randn=lambda *size, **kwargs: noise[0]))
    return _Drawn(model, noise), lambda b, n: (*inputs(b, n), torch.randn(b, 4, 32))


@row(f"vit-pytorch ats_vit{ADVISED}", others=())
def _sampled() -> Any:
    from vit_pytorch import ats_vit

    noise: list[torch.Tensor] = []

    def gumbel(shape: Any, *args: Any, **kwargs: Any) -> Any:
        return noise[0][:, : shape[1], : shape[2]]

    vars(ats_vit).update(sample_gumbel=gumbel)
    model, _ = _of("vit-pytorch ats_vit")
    drawn = torch.distributions.Gumbel(0.0, 1.0)
    return _Drawn(model, noise), lambda b, n: (*images(32)(b, n), drawn.sample((b, 16, 16)))


@row(f"point-transformer-pytorch layer{ADVISED}")
def _points() -> Any:
    first_of_equals()
    return _of("point-transformer-pytorch layer")


@row(f"mixture-of-attention experts{ADVISED}", length=16, others=(24, 9))
def _experts() -> Any:
    first_of_equals()
    return _of("mixture-of-attention experts")


@row(f"adjacent-attention-pytorch network{ADVISED}")
def _neighbours() -> Any:
    from adjacent_attention_network import adjacent_attention_network as adjacent

    class _Asked:
        def uniform_(self, low: float, high: float) -> torch.Tensor:
            return noise[0]

    noise: list[torch.Tensor] = []
    vars(adjacent).update(int=lambda most: 1 << 30)  # the noise, whatever the tensor says
    vars(adjacent).update(torch=_Torch(empty=lambda *size, **kwargs: _Asked()))
    model, inputs = _of("adjacent-attention-pytorch network")

    def drawn(b: int, n: int) -> Any:
        return {"inputs": inputs(b, n), "noise": torch.rand(n, n) / 50 - 0.01}

    return _Drawn(model, noise), drawn


@row(f"sinkhorn-transformer language model{ADVISED}", length=8, others=())
def _one_bucket() -> Any:
    model, inputs = _of("sinkhorn-transformer language model")
    return model, lambda b, n: inputs(b, 8)
