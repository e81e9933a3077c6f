"""The Python source of a draw: a file that anybody can read, and `python -m tests.fuzz` replays."""

from __future__ import annotations

import textwrap

from tests.fuzz.attending import attend, put_out
from tests.fuzz.choices import CHOICES, RULES, explained, is_near_miss
from tests.fuzz.grammar import OPTIONS, Draw, Grammar
from tests.fuzz.projecting import project
from tests.fuzz.writer import Writer

_FILE = '''\
"""{title}"""

import math

import torch
from torch import nn
from torch.nn import functional as F

SIZES = {sizes}
INPUTS = {inputs}
DYNAMIC = "{dynamic}"
OPTIONS = {options}
EXPLAINED = {explained}  # codes with which a site may be declined
NEAR_MISS = {near}
OVERFLOWS = {overflows}  # whether large scores have no weights in eager, though a softmax has them
H, G, D, M = {h}, {g}, {d}, {m}


class {name}(nn.Module):
    def __init__(self):
        super().__init__()
{made}
    def forward(self, {arguments}):
{steps}
'''
_LAYERS = """

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, {arguments}):
        for layer in self.layers:
            x = layer({arguments})
        return x
"""


def write(draw: Draw) -> str:
    """The source of a module `Model` without arguments, and what a trial has to know of it."""
    w = Writer(draw)
    project(w)
    attend(w)
    put_out(w)
    sizes, twice = w.sizes, draw["layers"] == "2"
    arguments = ", ".join(w.inputs)
    used = {letter for shape in w.inputs.values() for letter in shape.partition(":")[0].split()}
    choices = ", ".join(f"{name}: {option}" for name, option in ATTENTIONS.unusual(draw).items())
    text = _FILE.format(
        title=textwrap.fill(f"Drawn: {choices or 'all plain'}.", 96),
        sizes=sizes,
        inputs=w.inputs,
        dynamic=" ".join(letter for letter in draw["dynamic"].split() if letter in used),
        explained=sorted(explained(draw)),
        options=OPTIONS[draw["option"]],
        near=is_near_miss(draw),
        overflows=draw["softmax"] == "exp",
        name="Layer" if twice else "Model",
        made=_lines(w.made),
        arguments=arguments,
        steps=_lines(w.steps),
        **{letter: sizes[letter] for letter in "hgdm"},
    )
    return text.rstrip() + "\n" + (_LAYERS.format(arguments=arguments) if twice else "")


def _lines(statements: list[str]) -> str:
    return "".join(f"        {line}\n" for line in statements)


ATTENTIONS = Grammar(CHOICES, RULES, write, plain=0.45, first=("layers", "around"))
