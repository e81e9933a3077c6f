"""Inputs whose sizes a config has by names of its own: series, trajectories, regions of images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

STEPS = None
"""An axis that the config gives no size for: any number of steps, or of regions."""


@dataclass(frozen=True)
class Axes:
    """Those of an input behind its rows, by size or `STEPS`, of which `steps` is the name and
    `most` the largest number; whole numbers are `below` a bound."""

    sizes: tuple[int | None, ...]
    steps: str = ""
    most: int | None = None
    below: int | None = None


@dataclass(frozen=True)
class _Form:
    """The axes of an input: sizes, `STEPS`, or settings of the config; all but `steps` may be
    settings."""

    axes: tuple[str | int | None, ...]
    steps: str = ""
    most: str | None = None
    below: str | None = None


_OF_STEPS = {"steps": "steps", "most": "max_ep_len"}
_FORMS: Mapping[str, _Form] = {
    "past_values": _Form(("context_length", "num_input_channels")),
    "states": _Form((STEPS, "state_dim"), **_OF_STEPS),
    "actions": _Form((STEPS, "act_dim"), **_OF_STEPS),
    "rewards": _Form((STEPS, 1), **_OF_STEPS),
    "returns_to_go": _Form((STEPS, 1), **_OF_STEPS),
    "timesteps": _Form((STEPS,), below="max_ep_len", **_OF_STEPS),
    "visual_feats": _Form((STEPS, "visual_feat_dim"), "regions"),
    "visual_pos": _Form((STEPS, "visual_pos_dim"), "regions"),
}
BESIDE = tuple(_FORMS)
"""Inputs that a model may need though its forward has a default for them."""


def axes_of(name: str, config: Any) -> Axes | None:
    """Of an input of this name, where the config has its sizes."""
    form = _FORMS.get(name)
    if form is None:
        return None
    asked = [axis for axis in (*form.axes, form.most, form.below) if isinstance(axis, str)]
    said = {axis: getattr(config, axis, None) for axis in asked}
    if not all(isinstance(size, int) and size > 0 for size in said.values()):
        return None
    sizes = tuple(said[axis] if isinstance(axis, str) else axis for axis in form.axes)
    most, below = (None if n is None else said[n] for n in (form.most, form.below))
    return Axes(sizes, form.steps, most, below)
