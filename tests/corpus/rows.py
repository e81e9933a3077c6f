"""Rows of the corpus, written as `type [key=value ...]`.

`bert head=QuestionAnswering length=33 hidden_act=relu` is a model type with a task head, another
sequence length, and options of its config. A dotted key is an option of a part
(`vision_config.num_attention_heads=2`) or an item of a dict (`rope_parameters.rope_theta=100`).
`dims=batch,seq` makes these dims dynamic, and `attention=sdpa` says that the model works with this
one alone.

`inputs.bbox=int[3,16,4]<50` gives the model one more input, or another one than the builder's, of
whole numbers from 0 to 49; `inputs.past_values=float[3,32]` one of random numbers,
`inputs.pixel_mask=ones[3,32,32]` one of integers 1, `inputs.spatial_shapes=[[2,3],[3,2]]` these
integers, and `inputs.attention_mask=None` takes one away. `fixed.grid_thw=[[1,4,4]]` is handed over
by the module itself: what never changes is no input.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
GIVEN = "architectures"
HELD_OUT = "held_out"
REMAINING = "remaining"
LISTS = (GIVEN, HELD_OUT, REMAINING)
NOT_BUILT = "not_built"
"""Types that are no row, each with its reason."""


@dataclass(frozen=True)
class Row:
    """A model type, what is asked of it, and `text`, by which records name it."""

    text: str
    model_type: str
    head: str | None = None
    length: int | None = None
    attention: str | None = None
    dims: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)


def rows(name: str) -> list[str]:
    """The rows of one of `LISTS`, in its order; a # starts a comment."""
    lines = (FOLDER / f"{name}.txt").read_text("utf-8").splitlines()
    return [text for line in lines if (text := line.partition("#")[0].strip())]


def not_built() -> dict[str, str]:
    """Why a type of transformers is no row, of each that is none: lines `type: reason`."""
    return dict(row.split(": ", 1) for row in rows(NOT_BUILT))


def parse_row(text: str) -> Row:
    """Reads one row. Raises ValueError where a word is no key=value."""
    model_type, *words = text.split()
    options: dict[str, Any] = {}
    for word in words:
        key, found, value = word.partition("=")
        if not found:
            raise ValueError(f"{word!r} in the row {text!r} is no key=value")
        options[key] = _value(value)
    head, length = options.pop("head", None), options.pop("length", None)
    attention = options.pop("attention", None)
    dims = tuple(options.pop("dims", "").split(",")) if "dims" in options else ()
    inputs, fixed = _below("inputs.", options), _below("fixed.", options)
    return Row(text, model_type, head, length, attention, dims, options, inputs, fixed)


def _below(prefix: str, options: dict[str, Any]) -> dict[str, Any]:
    """Takes the options of this prefix out of `options`."""
    names = [key for key in options if key.startswith(prefix)]
    return {name.removeprefix(prefix): options.pop(name) for name in names}


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
