"""Stacks of blocks: small models of every kind, whose masks come from wherever models have them."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable

from tests.fuzz import blocks
from tests.fuzz.grammar import OPTIONS, Draw, Grammar, Rule

BLOCKS: dict[str, str] = {
    "none": "",
    "attention": "Attention(M, *HOW)", "sdpa": "SDPA(M)", "cross": "Cross(M, *HOW)",
    "torch": "Torch(M)", "window": "Window(M, *HOW)", "latents": "Latents(M, *HOW)",
    "linear": "Linear(M)", "causal linear": "CausalLinear(M)", "decay": "Decay(M)",
    "gru": 'Recurrent(M, "gru")', "lstm": 'Recurrent(M, "lstm")', "rnn": 'Recurrent(M, "rnn")',
    "both ways": 'Recurrent(M, "both ways")', "loop": "Loop(M)",
    "gelu": 'MLP(M, "gelu")', "tanh gelu": 'MLP(M, "tanh gelu")', "relu": 'MLP(M, "relu")',
    "silu": 'MLP(M, "silu")', "quick": 'MLP(M, "quick")', "gated": "Gated(M)",
    "experts": "Experts(M)",
    "layer": 'Norm(M, "layer")', "rms": 'Norm(M, "rms")', "by hand": 'Norm(M, "by hand")',
    "batch": 'Norm(M, "batch")', "group": 'Norm(M, "group")',
    "conv": 'Convolution(M, "same")', "masked conv": 'Convolution(M, "masked")',
    "causal conv": 'Convolution(M, "causal")', "depthwise": 'Convolution(M, "depthwise")',
    "causal depthwise": 'Convolution(M, "causal depthwise")',
    "glu": 'Convolution(M, "causal glu")',
    "average": 'Pool(M, "average")', "max": 'Pool(M, "max")', "mean": 'Pool(M, "masked mean")',
    "squeeze": 'Pool(M, "squeeze")', "masked max": 'Pool(M, "masked max")',
    "running mean": 'Pool(M, "running")',
    "roll": 'Moved(M, "roll")', "shift": 'Moved(M, "shift")', "flip": 'Moved(M, "flip")',
    "fourier": 'Moved(M, "fourier")', "permuted": 'Moved(M, "permuted")',
    "distances": "Distances(M)",
}  # fmt: skip
_ATTENDS = ("attention", "sdpa", "cross", "torch", "window", "latents")
_SPELLED = ("attention", "cross", "window", "latents")
_SLOTS = ("block 1", "block 2", "block 3", "block 4")
_FIRST = ("gelu", *(name for name in BLOCKS if name not in ("none", "gelu")))
# attention in half of the slots
_LATER = (*BLOCKS, *(4 * _ATTENDS))

CHOICES: dict[str, tuple[str, ...]] = {
    "front": ("given", "ids", "ids and places", "ids and counted places", "frames", "patches"),
    "block 1": (*_FIRST, *(4 * _ATTENDS)),
    "block 2": _LATER,
    "block 3": _LATER,
    "block 4": _LATER,
    "residual": ("none", "add", "pre-norm", "post-norm", "scaled"),
    "again": ("no", "yes"),  # whether the blocks run twice, with the same weights
    "memory": ("itself", "given", "given, masked"),
    # where masks come from
    "mask": (
        "none", "bool", "int", "float", "hidden", "pad id", "pad id 0", "until the end id",
        "lengths", "segments", "separators", "threshold", "table", "energy", "added", "given",
    ),
    "and": ("none", "causal", "window", "prefix", "segments", "lengths", "anti-causal"),
    "without": ("as it is", "none if all"),  # a branch on the mask's values
    # how attentions are spelled
    "softmax": ("softmax", "max", "masked exp", "log"),
    "fill": ("-inf", "-1e9", "lowest", "-1e4"),
    "guard": (
        "none", "nan to num", "zero", "where any", "first key", "any", "additive", "times",
    ),
    # what is returned
    "output": ("all", "mean", "masked mean", "first", "last", "last valid", "logits", "both"),
    # how it is compiled
    "dynamic": ("", "b s t", "s t", "b", "s", "b s"),
    "range": ("from 1", "from 2", "4 to 9", "above 5"),
    "size": ("plain", "one", "seq = batch", "longer", "seq = width", "one of a batch"),
    "option": (
        "none", "exact", "fp16", "int8", "int4", "int8 activations", "padded rows",
        "each", "off",
    ),
    "relation": ("none", "twice", "renamed", "cuda"),
}  # fmt: skip

_RANGES = {"from 1": (1, None), "from 2": (2, None), "4 to 9": (4, 9), "above 5": (6, 17)}
_SIZES = {
    "plain": {"b": 2, "s": 6, "t": 7},
    "one": {"b": 2, "s": 1, "t": 3},
    "seq = batch": {"b": 6, "s": 6, "t": 6},
    "longer": {"b": 3, "s": 15, "t": 13},
    "seq = width": {"b": 2, "s": 8, "t": 8},
    "one of a batch": {"b": 1, "s": 7, "t": 6},
}
_IDS = ("ids", "ids and places", "ids and counted places")
_OF_IDS = ("pad id", "pad id 0", "until the end id", "separators", "table")
_VALID = {
    "bool": "present",
    "int": "present == 1",
    "float": "present > 0",
    "hidden": "~hidden",
    "pad id": "ids != 3",
    "pad id 0": "ids != 0",
}
"""Which rows are no padding, of a model's inputs."""


def _attends(draw: Draw, *kinds: str) -> bool:
    return any(draw[slot] in (kinds or _ATTENDS) for slot in _SLOTS)


def _when(test: Callable[[Draw], bool], *names: str, **values: str) -> Rule:
    """Where `test` holds, `names` are set back and `values` set."""
    return lambda draw: (
        {**{name: CHOICES[name][0] for name in names}, **values} if test(draw) else {}
    )


RULES: tuple[Rule, ...] = (
    _when(lambda d: d["mask"] in _OF_IDS and d["front"] not in _IDS, front="ids"),
    _when(lambda d: d["mask"] == "energy", front="frames"),
    _when(lambda d: d["front"] == "patches" and d["mask"] in ("added", "given"), "mask"),
    _when(lambda d: not _attends(d, "cross", "torch"), "memory"),
    _when(lambda d: not _attends(d, *_SPELLED), "softmax", "fill", "guard"),
    _when(lambda d: d["softmax"] == "masked exp" and d["fill"] == "-inf", fill="lowest"),
    # an infinite fill times a number that is 0
    _when(lambda d: d["guard"] == "times" and d["fill"] == "-inf", fill="lowest"),
    _when(lambda d: d["mask"] == "added" and d["guard"] == "times", "guard"),
    _when(lambda d: d["mask"] == "none", "without"),
    # both branches are only tried where results are compared
    _when(lambda d: d["without"] != "as it is" and d["option"] == "off", "option"),
    _when(lambda d: d["without"] != "as it is" and d["relation"] == "cuda", "relation"),
    _when(lambda d: d["mask"] == "none" and d["output"] in ("masked mean", "last valid"), "output"),
    _when(lambda d: d["output"] == "logits" and d["front"] not in _IDS, "output"),
    _when(lambda d: d["option"] == "padded rows" and d["mask"] not in _VALID, "option"),
    _when(lambda d: d["option"] == "padded rows", "output", **{"and": "none"}),
    # loops of Python and patches are of one length; torch has no windows of a dynamic one
    _when(
        lambda d: (
            (_attends(d, "loop", "window") or d["front"] == "patches") and "s" in d["dynamic"]
        ),
        dynamic="b",
    ),
    _when(lambda d: d["dynamic"] == "", "range"),
    _when(lambda d: d["size"] == "one" and "s" in d["dynamic"], "size"),
    _when(lambda d: d["size"] == "one of a batch" and "b" in d["dynamic"], "size"),
    _when(lambda d: d["range"] in ("above 5", "4 to 9") and d["size"] != "plain", "size"),
    _when(lambda d: d["range"] == "above 5", size="longer"),
    _when(lambda d: d["range"] == "4 to 9", size="seq = batch"),
    _when(lambda d: d["option"] in ("fp16", "int8", "int4"), "relation"),
)  # fmt: skip

_FILE = '''\
"""{title}"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIZES = {sizes}
INPUTS = {inputs}
DYNAMIC = "{dynamic}"
RANGE = {range}
OPTIONS = {options}
RELATION = "{relation}"
VALID = {valid}  # the rows that are compared, or all
EXPLAINED = None  # a site may be declined with any code
NEAR_MISS = True
HOW = "{softmax}", "{fill}", "{guard}"
M = {width}


{blocks}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
{made}
    def forward(self, {arguments}):
{steps}
'''


class _Lines:
    """A module in the making, as `Writer` has it."""

    def __init__(self) -> None:
        self.inputs: dict[str, str] = {}
        self.made: list[str] = []
        self.steps: list[str] = []


def write(draw: Draw) -> str:
    """The source of a module `Model` without arguments, and what a trial has to know of it."""
    w = _Lines()
    _front(w, draw)
    _mask(w, draw)
    _memory(w, draw)
    _blocks(w, draw)
    _output(w, draw)
    named = ", ".join(f"{n}: {v}" for n, v in STACKS.unusual(draw).items())
    used = {letter for shape in w.inputs.values() for letter in shape.partition(":")[0].split()}
    width = 32 if "weights" in OPTIONS[draw["option"]] else 8  # fewer bits need rows of 32
    low, high = _RANGES[draw["range"]]
    return (
        _FILE.format(
            title=textwrap.fill(f"Drawn: {named or 'all plain'}.", 96),
            sizes={**_SIZES[draw["size"]], "m": width},
            width=width,
            inputs=w.inputs,
            dynamic=" ".join(letter for letter in draw["dynamic"].split() if letter in used),
            range=(low, high),
            options=OPTIONS[draw["option"]],
            relation=draw["relation"],
            valid=(
                f"lambda {', '.join(w.inputs)}: {_VALID[draw['mask']]}"
                if draw["option"] == "padded rows"
                else None
            ),
            blocks="\n\n".join(_sources(w.made)),
            made="".join(f"        {line}\n" for line in w.made),
            steps="".join(f"        {line}\n" for line in w.steps),
            arguments=", ".join(w.inputs),
            **{name: draw[name] for name in ("softmax", "fill", "guard")},
        ).rstrip()
        + "\n"
    )


def _sources(made: list[str]) -> list[str]:
    """The source of the blocks that are made, and what they call."""
    text = "\n".join(made)
    names = [
        name
        for name, found in vars(blocks).items()
        if inspect.isclass(found)
        and found.__module__ == blocks.__name__
        and f"{name}(M" in text.replace("nn.", "nn_")
    ]
    found = [inspect.getsource(getattr(blocks, name)) for name in names]
    helpers = [
        inspect.getsource(function)
        for name, function in (("heads", blocks.heads), ("softmax", blocks.softmax))
        if any(f" {name}(" in source or f"({name}(" in source for source in found)
    ]
    return [*helpers, *found]


def _front(w: _Lines, draw: Draw) -> None:
    match draw["front"]:
        case "given":
            w.inputs["x"] = "b s m"
        case "frames":
            w.inputs["x"] = "b s m:frames"
        case "patches":
            w.inputs["image"] = "b 3 4 6"
            w.made.append("self.patches = nn.Conv2d(3, M, 2, 2)")
            w.steps.append("x = self.patches(image).flatten(2).mT")
        case front:
            kinds = {"until the end id": "ended ids", "pad id 0": "ids padded with 0"}
            w.inputs["ids"] = f"b s:{kinds.get(draw['mask'], 'ids')}"
            w.made.append("self.words = nn.Embedding(12, M)")
            w.steps.append("x = self.words(ids)")
            if front == "ids and places":
                w.made.append("self.places = nn.Embedding(32, M)")
                w.steps.append("x = x + self.places(torch.arange(ids.shape[1]))")
            elif front == "ids and counted places":
                w.made.append("self.places = nn.Embedding(32, M)")
                w.steps.append("there = (ids != 3).long()")
                w.steps.append("x = x + self.places(there.cumsum(-1) * there)")
    w.steps.append("b, s = x.shape[:2]")


def _mask(w: _Lines, draw: Draw) -> None:
    s = "6" if draw["front"] == "patches" else "s"

    def take(name: str, kind: str, shape: str = "") -> str:
        w.inputs[name] = f"{shape or f'b {s}'}:{kind}"
        return name

    match draw["mask"]:
        case "none":
            row = "torch.ones(b, s, dtype=torch.bool)"
        case "bool":
            row = take("present", "padding")
        case "int":
            row = f"{take('present', 'int padding')} == 1"
        case "float":
            row = f"{take('present', 'float padding')} > 0"
        case "hidden":
            row = f"~{take('hidden', 'hidden')}"
        case "pad id":
            row = "ids != 3"
        case "pad id 0":
            row = "ids.bool()"
        case "until the end id":
            row = "(ids == 2).cumsum(-1) == 0"
        case "lengths":
            row = f"torch.arange(s) < {take('lengths', 'lengths', 'b')}[:, None]"
        case "threshold":
            row = f"{take('salience', 'salience')}.sigmoid() > 0.5"
        case "table":
            w.made.append('self.register_buffer("real", torch.arange(12) != 3)')
            row = "self.real[ids]"
        case "energy":
            row = "x.abs().sum(-1) > 0"
        case "segments":
            w.steps.append(f"segments = {take('segments', 'segments')}")
            w.steps.append("keep = (segments[:, :, None] == segments[:, None])[:, None]")
            row = ""
        case "separators":
            w.steps.append("segments = (ids == 4).cumsum(1)")
            w.steps.append("keep = (segments[:, :, None] == segments[:, None])[:, None]")
            row = ""
        case "added":
            row = f"{take('added', 'added')} > -1.0"
        case _:
            w.steps.append(f"keep = {take('given', 'mask', f'b 1 {s} {s}')}")
            row = ""
    if row:
        w.steps.append(f"keep = ({row})[:, None, None]")
    w.steps.append("valid = keep[:, 0].any(1)")
    if draw["without"] == "none if all":
        w.steps += ["if keep.all():", "    keep = torch.ones_like(keep)"]
    places = "torch.arange(s)[:, None]", "torch.arange(s)"
    also = {
        "causal": "{0} >= {1}",
        "anti-causal": "{0} <= {1}",
        "window": "({0} - {1}).abs() < 3",
        "prefix": "({0} >= {1}) | ({1} < 2)",
        "segments": "{0} // 3 == {1} // 3",
    }
    if draw["and"] in also:
        w.steps.append(f"keep = keep & ({also[draw['and']].format(*places)})")
    elif draw["and"] == "lengths":
        more = take("more", "lengths", "b")
        w.steps.append(f"keep = keep & (torch.arange(s) < {more}[:, None, None, None])")


def _memory(w: _Lines, draw: Draw) -> None:
    if draw["memory"] == "itself":
        w.steps.append("memory, seen = x, valid[:, None, None]")
        return
    w.inputs["memory"] = "b t m"
    if draw["memory"] == "given":
        w.steps.append("seen = torch.ones(b, 1, 1, memory.shape[1], dtype=torch.bool)")
    else:
        w.inputs["memory_mask"] = "b t:int padding"
        w.steps.append("seen = (memory_mask != 0)[:, None, None]")


def _blocks(w: _Lines, draw: Draw) -> None:
    names = [draw[slot] for slot in _SLOTS if draw[slot] != "none"]
    normed = draw["residual"] in ("pre-norm", "post-norm")
    w.made += [f"self.block_{i} = {BLOCKS[name]}" for i, name in enumerate(names)]
    if normed:
        w.made += [f"self.norm_{i} = nn.LayerNorm(M)" for i in range(len(names))]
    if draw["residual"] == "scaled":
        w.made.append("self.scales = nn.Parameter(torch.empty(4, M))")
    lines = {
        "none": "x = {block}",
        "add": "x = x + {block}",
        "pre-norm": "x = x + {block}",
        "post-norm": "x = self.norm_{i}(x + {block})",
        "scaled": "x = x + self.scales[{i}] * {block}",
    }
    steps = []
    for i in range(len(names)):
        x = f"self.norm_{i}(x)" if draw["residual"] == "pre-norm" else "x"
        block = f"self.block_{i}({x}, keep, memory, seen)"
        steps.append(lines[draw["residual"]].format(i=i, block=block))
    if draw["again"] == "yes":
        w.steps.append("for _ in range(2):")
        steps = [f"    {step}" for step in steps]
    w.steps += steps


def _output(w: _Lines, draw: Draw) -> None:
    count = "valid.sum(-1, keepdim=True)"
    found = {
        "all": "x",
        "mean": "x.mean(1)",
        "masked mean": f"(x * valid[..., None]).sum(1) / {count}.clamp(min=1)",
        "first": "torch.tanh(x[:, 0])",
        "last": "x[:, -1:]",
        "last valid": f"x[torch.arange(b), ({count}[:, 0] - 1).clamp(min=0)]",
        "logits": "x @ self.words.weight.T",
        "both": "x, {'pooled': x.amax(1)}",
    }[draw["output"]]
    w.steps.append(f"return {found}")


STACKS = Grammar(CHOICES, RULES, write, plain=0.4, first=(*_SLOTS[1:], "again", "option"))
