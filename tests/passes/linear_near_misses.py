"""Recurrences that look like linear attention, and are none."""

from __future__ import annotations

from torch import Tensor

from tests.passes.linear_attentions import (
    CubicDeltaLoop,
    CubicLoop,
    EulerLoop,
    FeatureEulerLoop,
    Layer,
    LeakingFeatures,
    LeakingHeads,
    Loop,
)


class Ahead(Layer):
    """Each token sees the next one too."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return self.joined((q @ k.mT).tril(1) @ v)


class DecayOfState(Loop):
    """The decay depends on the state."""

    def step(self, state: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return state * state.sum((-1, -2), keepdim=True).sigmoid() + k[..., None] * v[..., None, :]


class DecayAfterDelta(Loop):
    """The delta rule corrects what the state was before it decayed."""

    def step(self, state: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
        rest = v - (state * k[..., None]).sum(-2)
        state = state * a[..., None, None]
        return state + k[..., None] * (b * rest)[..., None, :]


class ValueGatedLoop(Loop):
    """A decay of each value feature."""

    def step(self, state: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return state * v.sigmoid()[..., None, :] + k[..., None] * v[..., None, :]


class Late(Layer):
    """Reads the state before the token is in it."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return self.joined((q @ k.mT).tril(-1) @ v)


class Everywhere(Layer):
    """Each token sees all."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return self.joined((q @ k.mT) @ v)


NEAR_MISSES: tuple[type[Layer], ...] = (
    *(Ahead, DecayOfState, DecayAfterDelta, ValueGatedLoop, Late, Everywhere),
    *(CubicLoop, CubicDeltaLoop, EulerLoop, FeatureEulerLoop, LeakingHeads, LeakingFeatures),
)
