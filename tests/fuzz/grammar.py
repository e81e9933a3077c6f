"""A grammar: choices with options, rules for what has no meaning beside others, and a writer."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Draw = Mapping[str, str]
"""An option for each choice."""
Choices = Mapping[str, tuple[str, ...]]
"""The options of each choice. The first is its default."""
Rule = Callable[[dict[str, str]], Mapping[str, str]]
"""What a draw is to have instead."""
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "exact": {"exact": True},
    "fp16": {"precision": "fp16"},
    "int8": {"weights": "int8"},
    "int4": {"weights": "int4"},
    "int8 activations": {"weights": "int8", "activations": "int8"},
    "padded rows": {"ignore_padded_rows": True},
    "each": {"verify": "each"},
    "off": {"verify": "off"},
}
"""Keywords of a compile, by the options of a choice. No user's word that may be false."""


@dataclass(frozen=True)
class Grammar:
    """What is drawn, and how its source is written.

    A choice keeps its default in `plain` of the draws, and may by the dice anyway. A draw is made
    simpler by `first` before the other choices: those that leave most of a module out.
    """

    choices: Choices
    rules: Sequence[Rule]
    write: Callable[[Draw], str]
    plain: float
    first: Sequence[str] = ()

    def draw(self, seed: int) -> Draw:
        """The draw of a seed, settled; another one where the choices have changed."""
        source = random.Random(seed)
        found = {}
        for name, options in self.choices.items():
            plain = source.random() < self.plain
            found[name] = options[0] if plain else source.choice(options)
        return self.settle(found)

    def settle(self, draw: Draw) -> Draw:
        """The draw with what has no meaning in it set back. Draws that compute the same are equal;
        choices that are left out keep their defaults.
        """
        found = {name: draw.get(name, options[0]) for name, options in self.choices.items()}
        for rule in self.rules:
            for name, option in rule(found).items():
                assert option in self.choices[name], (name, option)
                found[name] = option
        return found

    def unusual(self, draw: Draw) -> dict[str, str]:
        """The choices that are not at their defaults."""
        return {name: value for name, value in draw.items() if value != self.choices[name][0]}

    def simpler(self, draw: Draw) -> Iterator[Draw]:
        """Draws with fewer choices left: those of this one with one set back."""
        for name in (*self.first, *self.choices):
            if draw[name] != self.choices[name][0]:
                less = self.settle({**draw, name: self.choices[name][0]})
                if self.unusual(less).items() < self.unusual(draw).items():
                    yield less
