"""Rows of the corpus, written as `type [key=value ...]`.

`bert head=QuestionAnswering length=33 hidden_act=relu` is a model type with a task head, another
sequence length, and options of its config. A dotted key is an option of a part
(`vision_config.num_attention_heads=2`). `dims=batch,seq` makes these dims dynamic.
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
LISTS = (GIVEN, HELD_OUT)


@dataclass(frozen=True)
class Row:
    """A model type, what is asked of it, and `text`, by which records name it."""

    text: str
    model_type: str
    head: str | None = None
    length: int | None = None
    dims: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


def rows(name: str) -> list[str]:
    """The rows of one of `LISTS`, in its order; a # starts a comment."""
    lines = (FOLDER / f"{name}.txt").read_text("utf-8").splitlines()
    return [text for line in lines if (text := line.partition("#")[0].strip())]


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
    dims = tuple(options.pop("dims", "").split(",")) if "dims" in options else ()
    return Row(text, model_type, head, length, dims, options)


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
