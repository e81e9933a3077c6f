"""Decoders that keep keys and values: every form of the cache, of places and of what is hidden."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping

from tests.fuzz.cached_layers import Lines, layer, token_axes
from tests.fuzz.grammar import OPTIONS, Draw, Grammar, Rule

CHOICES: dict[str, tuple[str, ...]] = {
    "layers": ("1", "2"),
    "groups": ("all", "two", "one"),
    "grouped": ("repeat", "expand", "view"),
    "projection": ("separate", "joint"),
    # how the cache is taken and given back
    "cache": ("tensors", "pairs", "by layer", "stacked", "object", "transformers"),
    "axes": ("bhpd", "bphd", "bpm", "keys across", "pbhd"),
    "returned": ("as given", "values first", "last first", "logits last"),
    # where tokens stand
    "places": (
        "learned", "none", "half", "interleaved", "partial", "sinusoids", "alibi", "slopes",
        "relative",
    ),
    "counted": ("index", "mask", "given"),
    "turned": ("new keys", "all keys"),
    # scores
    "norm": ("none", "rms", "l2"),
    "scale": ("scores /", "scores *", "query", "both"),
    "softcap": ("none", "tanh"),
    "causal": ("compare", "tril", "triu", "table", "added"),
    "window": ("none", "three", "chunk", "sinks and three"),
    "mask": ("none", "int", "bool", "float"),
    "applied": ("fill", "where", "add"),
    "fill": ("-inf", "-1e9", "lowest"),
    "softmax": ("softmax", "sdpa", "float", "max", "masked exp", "log"),
    "sinks": ("none", "joined"),
    "guard": ("none", "nan to num", "any"),
    # around it
    "around": ("residual", "none", "mlp", "parallel"),
    "head": ("linear", "tied"),
    "logits": ("all", "last"),
    # how it is compiled
    "ids": ("long", "int"),
    "kept": ("growing", "static 32", "static 15"),
    "size": ("plain", "seq = past", "one new", "one past"),
    "option": ("none", "exact", "fp16", "int8", "int4", "each", "off"),
}  # fmt: skip
_SIZES = {
    "plain": {"b": 2, "s": 3, "p": 5, "n": 8},
    "seq = past": {"b": 3, "s": 4, "p": 4, "n": 8},
    "one new": {"b": 2, "s": 2, "p": 9, "n": 11},
    "one past": {"b": 4, "s": 7, "p": 2, "n": 9},
}
_KEPT = {
    "growing": {},
    "static 32": {"cache": "static", "max_length": 32},
    "static 15": {"cache": "static", "max_length": 15},
}
_GROUPS = {"all": 4, "two": 2, "one": 1}
_ROTARY = ("half", "interleaved", "partial")
_COUNTED = (*_ROTARY, "learned", "sinusoids", "slopes")
_MASKS = {"int": "int padding", "bool": "padding", "float": "float padding"}


def _when(test: Callable[[Draw], bool], *names: str, **values: str) -> Rule:
    """Where `test` holds, `names` are set back and `values` set."""
    return lambda draw: (
        {**{name: CHOICES[name][0] for name in names}, **values} if test(draw) else {}
    )


RULES: tuple[Rule, ...] = (
    _when(lambda d: d["groups"] == "all", "grouped"),
    # a cache of transformers is of one form, and what is stacked has one shape
    _when(lambda d: d["cache"] == "transformers", "axes"),
    _when(lambda d: d["cache"] in ("by layer", "stacked") and d["axes"] == "keys across", "axes"),
    _when(lambda d: d["cache"] in ("by layer", "stacked", "transformers"), "returned"),
    _when(lambda d: d["counted"] == "mask" and d["mask"] == "none", mask="int"),
    _when(lambda d: d["places"] not in _COUNTED, "counted"),
    _when(lambda d: d["places"] == "slopes" and d["counted"] == "given", "counted"),
    _when(lambda d: d["places"] not in _ROTARY or d["counted"] == "given", "turned"),
    _when(lambda d: d["softmax"] == "sdpa", "softcap", "sinks", "scale"),
    _when(lambda d: d["softmax"] == "masked exp", "applied", "sinks", "guard", fill="-1e9"),
    # NaN of a row without keys reaches others through the keys of the next layer
    _when(
        lambda d: (
            d["mask"] != "none"
            and d["fill"] == "-inf"
            and d["guard"] == "none"
            and d["softmax"] != "sdpa"
        ),
        guard="nan to num",
    ),
    _when(lambda d: d["mask"] == "none", "guard"),
    _when(lambda d: d["softmax"] == "sdpa" and d["grouped"] == "view", "grouped"),
)

_FILE = '''\
"""{title}"""

import math

import torch
from torch import nn
from torch.nn import functional as F

SIZES = {sizes}
INPUTS = {inputs}  # of Whole
TAKEN = {taken}
DYNAMIC = "b s p n"
OPTIONS = {options}
CACHE = {kept}
RETURNED = {returned}
LAST = {last}  # whether logits are those of the last token alone
EXPLAINED = {explained}  # codes with which a site may be declined
NEAR_MISS = False
H, G, D, M = 4, {g}, {d}, {m}


def ARGS({names}):
    return {args}

{functions}
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
{made}
    def forward(self, x, past, i, visible, bias, places, key_places):
{steps}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(12, M)
        self.layers = nn.ModuleList(Layer() for _ in range({layers}))
{above}
    def forward(self, {arguments}):
{around}

class Whole(Model):
    """All tokens, without a past. Rows of padding are 0."""

    def forward(self, {whole}):
{nothing}'''


def write(draw: Draw) -> str:
    """The source of a decoder `Model`, of `Whole` without a past, and what a trial has to know."""
    w = Lines(draw)
    masked, kind = not w.is_("mask", "none"), _MASKS.get(draw["mask"], "")
    inputs = {"ids": "b s:ids" if w.is_("ids", "long") else "b s:int ids"}
    plain = dict(inputs)
    if masked:
        inputs["mask"], plain["mask"] = f"b s:{kind}", f"b n:{kind}"
    if w.is_("counted", "given"):
        plain["position_ids"] = "b s:places"
    shapes = _shapes(w)
    listed = ", ".join(plain)
    args = taken = ", ".join(shapes)
    if w.is_("cache", "pairs", "object"):
        taken, args = "past", "[" + _pairs(shapes) + "]"
    _above(w, shapes)
    layer(w)
    nothing = ["b, s = ids.shape"]
    if w.is_("counted", "given"):
        count = "(mask.long().cumsum(1) - 1).clamp(min=0)"
        count = count if masked else "torch.arange(s)[None].expand(b, s)"
        nothing.append(f"position_ids = {count}")
    for name, shape in shapes.items():
        sizes = ", ".join("0" if size == "p" else size for size in shape.split())
        nothing.append(f"{name} = torch.zeros({sizes})")
    place = -1 if w.is_("returned", "logits last") else 0
    nothing.append(f"logits = super().forward(*ARGS({listed}, {', '.join(shapes)}))[{place}]")
    if masked:
        rows = "[:, -1:, None]" if w.is_("logits", "last") else "[:, :, None]"
        nothing.append(f"return logits.masked_fill(mask{rows} == 0, 0.0)")
    else:
        nothing.append("return logits")
    named = ", ".join(f"{n}: {v}" for n, v in DECODERS.unusual(draw).items())
    return _FILE.format(
        title=textwrap.fill(f"Drawn: {named or 'all plain'}.", 96),
        sizes={**_SIZES[draw["size"]], "m": w.width},
        inputs=inputs,
        taken={**plain, **shapes},
        options=OPTIONS[draw["option"]],
        kept=_KEPT[draw["kept"]],
        returned=_order(w, shapes),
        last=w.is_("logits", "last"),
        explained=_explained(draw),
        g=_GROUPS[draw["groups"]],
        d=w.width // 4,
        m=w.width,
        names=", ".join([*plain, *shapes]),
        args=f"({listed}, {args})",
        functions="".join(f"\n{text}\n\n" for text in w.functions),
        made=_indented(w.made),
        steps=_indented(w.steps),
        layers=w.layers,
        above=_indented(w.above),
        arguments=f"{listed}, {taken}",
        around=_indented(w.around),
        whole=", ".join(inputs),
        nothing=_indented(nothing),
    )


def _indented(lines: list[str]) -> str:
    return "".join(f"        {line}\n" for line in lines)


def _shapes(w: Lines) -> dict[str, str]:
    """The tensors of a past."""
    g, d = _GROUPS[w.draw["groups"]], w.width // 4
    forms = {
        "bhpd": f"b {g} p {d}", "bphd": f"b p {g} {d}", "bpm": f"b p {g * d}",
        "keys across": f"b {g} {d} p", "pbhd": f"p b {g} {d}",
    }  # fmt: skip
    key = forms[w.draw["axes"]]
    value = forms["bhpd"] if w.is_("axes", "keys across") else key
    if w.is_("cache", "by layer"):
        return {f"past_{i}": f"2 {key}" for i in range(w.layers)}
    if w.is_("cache", "stacked"):
        return {"past": f"{w.layers} 2 {key}"}
    kinds = (("key", key), ("value", value))
    return {f"past_{name}_{i}": shape for i in range(w.layers) for name, shape in kinds}


def _pairs(shapes: Mapping[str, str]) -> str:
    names = [*shapes]
    return ", ".join(f"({k}, {v})" for k, v in zip(names[::2], names[1::2], strict=True))


def _above(w: Lines, shapes: Mapping[str, str]) -> None:
    """What is before and behind the layers."""
    run, masked = w.around.append, not w.is_("mask", "none")
    name, shape = next(iter(shapes.items()))
    if w.is_("cache", "pairs", "object"):
        name = "past[0][0]"
    run("b, s = ids.shape")
    run(f"p = {name}.shape[{shape.split().index('p')}]")
    run("n = p + s")
    if masked:
        run("torch._check(mask.shape[1] == n)")
    run("at, to = torch.arange(p, n)[:, None], torch.arange(n)")
    if w.is_("counted", "mask"):
        run("key_places = (mask.long().cumsum(1) - 1).clamp(min=0)")
        run("places = key_places[:, p:]")
    elif w.is_("counted", "given"):
        run("places = key_places = position_ids")
    else:
        run("places, key_places = to[None, p:], to[None]")
    run("x = self.words(ids)")
    _places(w)
    _visible(w, masked)
    match w.draw["cache"]:
        case "tensors":
            run(f"past = [{_pairs(shapes)}]")
        case "by layer":
            run(f"past = [{', '.join(shapes)}]")
        case "object":
            w.functions.append(_KEPT_SOURCE.format(axes=token_axes(w)))
            run("past = Kept(past)")
        case "transformers":
            w.functions.append("from transformers import DynamicCache")
            run("kept = DynamicCache()")
            run(f"for i, pair in enumerate([{_pairs(shapes)}]):")
            run("    kept.update(*pair, i)")
            run("past = kept")
    run("grown = []")
    run("for i, layer in enumerate(self.layers):")
    each = "past" if w.is_("cache", "object", "transformers") else "past[i]"
    run(f"    x, key, value = layer(x, {each}, i, visible, bias, places, key_places)")
    run("    grown.append((key, value))")
    if w.is_("logits", "last"):
        run("x = x[:, -1:]")
    if w.is_("head", "tied"):
        run("logits = x @ self.words.weight.T")
    else:
        w.above.append("self.head = nn.Linear(M, 12)")
        run("logits = self.head(x)")
    _returned(w)


_KEPT_SOURCE = """\
class Kept:
    def __init__(self, pairs):
        self.pairs = [*pairs]

    def update(self, key, value, i):
        both = zip(self.pairs[i], (key, value), {axes})
        self.pairs[i] = tuple(torch.cat([old, new], axis) for old, new, axis in both)
        return self.pairs[i]"""


def _explained(draw: Draw) -> list[str]:
    """The codes with which a site of this draw may be declined."""
    found = ["epsilon-in-softmax"] if draw["softmax"] == "masked exp" else []
    if draw["option"] == "exact" and draw["fill"] == "-1e9":
        found.append("weak-fill")  # as scores may pass it
    return found


def _order(w: Lines, shapes: Mapping[str, str]) -> list[str]:
    """The outputs, by what they are of the past that comes next."""
    names = [*shapes]
    if w.is_("returned", "values first", "last first"):
        names.reverse()
        if w.is_("returned", "values first"):
            pairs = zip(names[::2], names[1::2], strict=True)
            names = [name for pair in [*pairs][::-1] for name in pair]
        else:
            pairs = zip(names[::2], names[1::2], strict=True)
            names = [name for value, key in pairs for name in (key, value)]
    return [*names, "logits"] if w.is_("returned", "logits last") else ["logits", *names]


def _returned(w: Lines) -> None:
    pairs = "grown[::-1]" if w.is_("returned", "last first") else "grown"
    order = "pair[::-1]" if w.is_("returned", "values first") else "pair"
    match w.draw["cache"]:
        case "by layer":
            found = "*(torch.stack(pair) for pair in grown)"
        case "stacked":
            found = "torch.stack([torch.stack(pair) for pair in grown])"
        case "pairs":
            found = f"[{order} for pair in {pairs}]"
        case _:
            found = f"*(part for pair in {pairs} for part in {order})"
    last = w.is_("returned", "logits last")
    w.around.append(f"return {found}, logits" if last else f"return logits, {found}")


def _places(w: Lines) -> None:
    run, make = w.around.append, w.above.append
    if w.is_("places", "learned"):
        make("self.places = nn.Embedding(64, M)")
        run("x = x + self.places(places)")
    elif w.is_("places", "sinusoids"):
        make('self.register_buffer("rates", 0.3 ** torch.arange(M // 2).float())')
        run("angles = places[..., None] * self.rates")
        run("x = x + torch.cat([angles.sin(), angles.cos()], -1)")
    biases = {
        "alibi": "self.slopes * (to - at)",
        "slopes": "self.slopes * key_places[:, None, None]",
        "relative": "self.near((at - to).clamp(0, 5)).permute(2, 0, 1)",
    }
    if w.is_("places", "alibi", "slopes"):
        make("slopes = 0.5 ** torch.arange(1, H + 1).float()")
        make('self.register_buffer("slopes", slopes[:, None, None])')
    elif w.is_("places", "relative"):
        make("self.near = nn.Embedding(6, H)")
    run(f"bias = {biases.get(w.draw['places'])}")


def _visible(w: Lines, masked: bool) -> None:
    if w.is_("causal", "table"):
        table = "torch.ones(64, 64, dtype=torch.bool).tril()"
        w.above.append(f'self.register_buffer("causal", {table})')
    shown = [
        {
            "compare": "to <= at",
            "tril": "torch.ones(n, n, dtype=torch.bool).tril()[p:]",
            "triu": "~torch.ones(n, n).triu(1).bool()[p:]",
            "table": "self.causal[p:n, :n]",
            "added": 'torch.full((n, n), float("-inf")).triu(1)[p:] == 0',
        }[w.draw["causal"]]
    ]
    windows = {
        "three": "at - to < 3",
        "chunk": "at // 4 == to // 4",
        "sinks and three": "(at - to < 3) | (to < 2)",
    }
    if w.draw["window"] in windows:
        shown.append(windows[w.draw["window"]])
    if masked:
        shown.append("mask[:, None, None] != 0")
    w.around.append(f"visible = {' & '.join(f'({each})' for each in shown)}")
    if w.is_("sinks", "joined") and not masked:
        w.around.append("visible = visible[None, None]")


DECODERS = Grammar(CHOICES, RULES, write, plain=0.5, first=("layers", "kept", "option"))
