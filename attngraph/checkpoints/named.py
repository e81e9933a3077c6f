"""Inputs whose sizes a config has by names of its own: series, trajectories, regions of images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

STEPS = None
"""An axis that the config gives no size for: any number of steps, or of regions."""


@dataclass(frozen=True)
class Axes:
    """Those of an input behind its rows, by size or `STEPS`, of which `steps` is the name and
    `most` the largest number; whole numbers are `below` a bound, and of a mask all are 1."""

    sizes: tuple[int | None, ...]
    steps: str = ""
    most: int | None = None
    below: int | None = None
    is_mask: bool = False


@dataclass(frozen=True)
class _Form:
    """The axes of an input: sizes, `STEPS`, or settings of the config; all but `steps` may be
    settings."""

    axes: tuple[str | int | None, ...]
    steps: str = ""
    most: str | None = None
    below: str | int | None = None
    is_mask: bool = False


def _lagged(config: Any) -> int:
    """The steps of a series that are read, each beside those that lie some lags before it."""
    return int(config.context_length) + max(map(int, config.lags_sequence))


def _future(config: Any) -> int:
    return int(config.prediction_length) if _lagged(config) else 0


_COMPUTED: Mapping[str, Callable[[Any], int]] = {
    "lagged": _lagged,
    "lagged_alone": lambda config: _lagged(config) if config.input_size == 1 else 0,
    "future": _future,
    "future_alone": lambda config: _future(config) if config.input_size == 1 else 0,
    "features": lambda c: int(c.num_time_features) + int(c.num_dynamic_real_features),
    "categories": lambda config: min(map(int, config.cardinality)),
}
"""Settings that follow from others."""
_FORECAST: Mapping[str, tuple[_Form, ...]] = {
    "past_values": (
        _Form(("lagged_alone",)),
        _Form(("lagged", "input_size")),
        _Form(("context_length", "num_input_channels")),
        _Form(("context_length",)),
    ),
    "past_values_padding": (_Form(("context_length",), below=1),),
    "past_time_features": (_Form(("lagged", "features")),),
    "past_observed_mask": (
        _Form(("lagged_alone",), is_mask=True),
        _Form(("lagged", "input_size"), is_mask=True),
    ),
    "static_categorical_features": (
        _Form(("num_static_categorical_features",), below="categories"),
    ),
    "static_real_features": (_Form(("num_static_real_features",)),),
    "future_values": (_Form(("future_alone",)), _Form(("future", "input_size"))),
    "future_time_features": (_Form(("future", "features")),),
    "freq": (_Form((1,), below="freq_size"),),
}
TOGETHER = tuple(_FORECAST)
"""Inputs that mean nothing without each other: of a series, its past, what is known of its future
and what its decoder begins from."""


def _of_steps(*width: str | int, below: str | None = None) -> tuple[_Form, ...]:
    return (_Form((STEPS, *width), "steps", "max_ep_len", below),)


_OTHERS: Mapping[str, tuple[_Form, ...]] = {
    "states": _of_steps("state_dim"),
    "actions": _of_steps("act_dim"),
    "rewards": _of_steps(1),
    "returns_to_go": _of_steps(1),
    "timesteps": _of_steps(below="max_ep_len"),
    "visual_feats": (_Form((STEPS, "visual_feat_dim"), "regions"),),
    "visual_pos": (_Form((STEPS, "visual_pos_dim"), "regions"),),
    "decoder_input_values": (_Form((STEPS, "num_mel_bins"), "frames"),),
    "speaker_embeddings": (_Form(("speaker_embedding_dim",)),),
    "spectrogram": (_Form((STEPS, "model_in_dim"), "frames"),),
    "task_inputs": (_Form(("task_seq_len",), below="text_encoder_vocab_size"),),
}
BESIDE = tuple(_OTHERS)
"""Inputs that a model may need though its forward has a default for them."""


def axes_of(name: str, config: Any) -> Axes | None:
    """The axes of an input of this name, where the config has their sizes."""
    forms = {**_FORECAST, **_OTHERS}.get(name, ())
    return next((axes for form in forms if (axes := _sized(form, config)) is not None), None)


def _sized(form: _Form, config: Any) -> Axes | None:
    asked = [axis for axis in (*form.axes, form.most, form.below) if isinstance(axis, str)]
    said = {axis: _setting(axis, config) for axis in asked}
    if not all(isinstance(size, int) and size > 0 for size in said.values()):
        return None
    sizes = tuple(said[axis] if isinstance(axis, str) else axis for axis in form.axes)
    most = None if form.most is None else said[form.most]
    below = said[form.below] if isinstance(form.below, str) else form.below
    return Axes(sizes, form.steps, most, below, form.is_mask)


def _setting(name: str, config: Any) -> Any:
    compute = _COMPUTED.get(name)
    if compute is None:
        return getattr(config, name, None)
    try:
        return compute(config)
    except (AttributeError, TypeError, ValueError):  # it lacks what this follows from
        return None
