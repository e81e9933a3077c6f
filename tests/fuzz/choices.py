"""The choices an attention module is drawn from. The first option of each is the default.

Any combination is a draw: RULES set back what has no meaning beside another choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.fuzz.grammar import Draw, Rule

CHOICES: dict[str, tuple[str, ...]] = {
    # what is attended to, and how large it is
    "keys": ("self", "cross", "cache"),
    "sizes": (
        "plain", "one head", "one feature", "seq = heads", "batch = heads", "all equal",
        "one query", "one of a batch", "keys = features", "longer",
    ),
    "dynamic": ("", "b s t p", "s t p", "b", "s"),
    "order": ("batch", "sequence"),
    # from the input to heads
    "projection": (
        "linear", "no bias", "chunk", "split", "unbind", "index", "slice", "packed heads",
        "matmul", "einsum", "conv", "by head", "none",
    ),
    "heads": ("view", "unflatten", "reshape", "interleaved", "stack"),
    "layout": ("bhsd", "bshd", "hbsd", "merged", "column", "loop"),
    "groups": ("none", "repeat", "expand", "tile", "view", "one"),
    "norm": ("none", "layer norm", "rms", "l2", "rms of all"),
    "rotary": ("none", "half", "interleaved", "complex", "partial"),
    "rotary tables": ("computed", "buffer"),
    # scores
    "product": ("matmul", "einsum", "sum"),
    "scores": ("bhst", "bsht", "bsth"),
    "scale": (
        "scores *", "none", "query", "key", "both", "scores /", "rsqrt", "pow", "per head",
        "masked *", "of data", "alpha",
    ),
    "softcap": ("none", "tanh"),
    "bias": (
        "none", "alibi", "table", "given", "distance", "sliced", "given -inf", "given lowest",
    ),
    # masks
    "mask": (
        "none", "causal", "padding", "window", "band", "chunk", "prefix", "lengths", "segments",
        "given", "random", "anti-causal", "strict", "lenient", "queries",
    ),
    "mask 2": ("none", "causal", "padding", "window", "lengths", "segments", "given", "queries"),
    "causal": ("arange", "tril", "triu", "cumsum", "buffer", "zeros", "transposed"),
    "padding": (
        "bool", "int", "float", "hidden", "pad id", "until the end id", "threshold", "table",
    ),
    "joined": ("and", "logical", "times", "or", "one by one"),
    "applied": ("fill", "where", "add where", "add filled", "add float", "times"),
    "fill": ("-inf", "-1e9", "lowest", "-1e4"),
    # from scores to weights
    "softmax": (
        "softmax", "float", "log", "exp", "max", "lse", "late", "one more", "sink", "sdpa",
        "queries",
    ),
    "after": (
        "none", "dropout", "renormalised", "masked", "masked, renormalised", "guarded", "gates",
        "talking", "returned", "where any",
    ),
    # from weights to the output
    "values": ("matmul", "einsum"),
    "gate": ("none", "sigmoid"),
    "output": ("linear", "none", "einsum", "sum of heads"),
    "around": ("none", "residual", "pre-norm", "post-norm", "mlp"),
    "layers": ("1", "2"),
    "option": ("none", "exact", "fp16", "each", "off"),
}  # fmt: skip

# Codes that an option may bring: with it, a site that is declined so is right to be.
EXPLAINED: dict[tuple[str, str], tuple[str, ...]] = {
    ("softmax", "queries"): ("softmax-axis", "axes-not-attention"),
    ("after", "talking"): ("talking-heads",),
    ("after", "masked"): ("weights-times-tensor", "weights-masked"),
    ("after", "masked, renormalised"): (
        *("weights-times-tensor", "weights-masked"),
        "epsilon-in-softmax",  # of exponentials that stay, for the sake of hidden rows
    ),
    # where masks may hide a whole row, they give it other numbers than a softmax does
    ("softmax", "exp"): ("no-softmax",),
    ("softmax", "lse"): ("no-softmax",),
    ("softmax", "one more"): ("no-softmax",),
}
NEAR_MISSES = {
    "mask": {"anti-causal", "strict", "lenient", "queries", "random"},
    "scale": {"of data"},
    "softmax": {"queries"},
    "groups": {"tile"},
    "mask 2": {"queries"},
}


def explained(draw: Draw) -> set[str]:
    """The codes with which a site of this draw may be declined."""
    found = {
        code for item, codes in EXPLAINED.items() if draw[item[0]] == item[1] for code in codes
    }
    # Which rows a bias, or a mask of its own, hides besides, a zeroed row doesn't say.
    if draw["after"] == "where any" and (
        draw["bias"].startswith("given")
        or draw["applied"].startswith("add")
        or (draw["mask 2"] != "none" and draw["joined"] == "one by one")
    ):
        found.add("weights-masked")
    hides = draw["mask"] != "none" or draw["bias"].startswith("given")
    hides |= draw["after"] == "guarded"  # which makes zeros of weights that overflowed, too
    return found if hides else found - {"no-softmax"}


def is_near_miss(draw: Draw) -> bool:
    """Whether something in it only resembles what is usual."""
    return draw["option"] == "exact" or any(
        draw[name] in options for name, options in NEAR_MISSES.items()
    )


def _plain(*names: str) -> Mapping[str, str]:
    return {name: CHOICES[name][0] for name in names}


def _when(test: Callable[[dict[str, str]], bool], *names: str, **values: str) -> Rule:
    """Where `test` holds, `names` are set back and `values` set."""
    return lambda d: {**_plain(*names), **values} if test(d) else {}


RULES: tuple[Rule, ...] = (
    # A cache has keys of its own layout, and one query is a query of a cache.
    _when(lambda d: d["keys"] == "cache", "order", "layers"),
    _when(lambda d: d["keys"] == "cache" and d["layout"] not in ("bhsd", "bshd"), "layout"),
    _when(lambda d: d["keys"] == "cache" and d["groups"] == "one", groups="repeat"),
    _when(lambda d: d["keys"] != "self", "layers"),
    _when(lambda d: d["sizes"] == "one query" and d["keys"] == "self", "sizes"),
    _when(lambda d: d["sizes"] == "one query" and d["dynamic"] in ("s", "s t p"), dynamic="b"),
    _when(lambda d: d["sizes"] == "one query" and d["dynamic"] == "b s t p", dynamic="b"),
    _when(lambda d: d["sizes"] == "one of a batch" and d["dynamic"] == "b", dynamic=""),
    _when(lambda d: d["sizes"] == "one of a batch" and d["dynamic"] == "b s t p", dynamic="s t p"),
    # Groups of heads, and projections that give queries, keys and values one width.
    _when(lambda d: d["sizes"] == "one head", "groups", "heads"),
    _when(
        lambda d: d["groups"] != "none"
        and d["projection"] in ("chunk", "unbind", "index", "packed heads", "none"),
        projection="split",
    ),
    _when(lambda d: d["groups"] == "view" and d["layout"] != "bhsd", groups="repeat"),
    _when(lambda d: d["projection"] == "none", "norm") ,
    _when(
        lambda d: d["projection"] in ("unbind", "packed heads", "einsum", "by head"), "heads"
    ),
    # Rotary positions turn pairs, of queries and keys of one sequence.
    _when(lambda d: d["sizes"] == "one feature" or d["keys"] == "cross", "rotary"),
    _when(lambda d: d["rotary"] == "none", "rotary tables"),
    _when(lambda d: d["sizes"] == "all equal" and d["rotary"] == "partial", rotary="half"),
    # Products and scores in another order of axes.
    _when(lambda d: d["layout"] != "bshd", "scores"),
    _when(lambda d: d["layout"] == "bshd", product="einsum", values="einsum"),
    _when(lambda d: d["layout"] not in ("bhsd", "bshd"), "product", "values"),
    _when(lambda d: d["groups"] == "view", "product", "values"),
    _when(lambda d: d["scale"] == "alpha" and d["layout"] != "merged", "scale"),
    # One operator for all between projections and output.
    _when(
        lambda d: d["softmax"] == "sdpa",
        "product", "scores", "softcap", "joined", "values", "applied",
    ),
    _when(lambda d: d["softmax"] == "sdpa" and d["after"] != "dropout", "after"),
    _when(lambda d: d["softmax"] == "sdpa" and d["layout"] in ("column", "loop"), layout="bhsd"),
    _when(lambda d: d["softmax"] == "sdpa" and d["groups"] == "view", groups="repeat"),
    _when(lambda d: d["softmax"] == "sdpa" and d["groups"] == "one", groups="expand"),
    _when(
        lambda d: d["softmax"] == "sdpa"
        and d["scale"] in ("scores /", "per head", "masked *", "of data", "alpha", "rsqrt"),
        "scale",
    ),
    # Masks.
    _when(lambda d: d["keys"] == "cross" and d["mask"] == "segments", mask="padding"),
    _when(lambda d: d["keys"] == "cross" and d["mask 2"] == "segments", **{"mask 2": "padding"}),
    _when(lambda d: d["keys"] == "cache" and d["mask"] == "segments", mask="causal"),
    _when(lambda d: d["keys"] == "cache" and d["mask 2"] == "segments", "mask 2"),
    _when(lambda d: d["mask"] == "none", "mask 2"),
    _when(lambda d: d["mask"] == d["mask 2"], "mask 2"),
    _when(
        lambda d: "causal" not in (d["mask"], d["mask 2"])
        and d["mask"] not in ("strict", "lenient", "anti-causal"),
        "causal",
    ),
    _when(lambda d: "padding" not in (d["mask"], d["mask 2"]), "padding"),
    _when(lambda d: d["mask 2"] == "none", "joined"),
    _when(lambda d: d["mask"] == "none", "applied", "fill"),
    _when(
        lambda d: d["fill"] == "-inf" and d["applied"] in ("add float", "times"), fill="lowest"
    ),
    _when(
        lambda d: d["mask"] == "none" and ("masked" in d["after"] or d["after"] == "where any"),
        "after",
    ),
    _when(lambda d: d["mask"] == "none" and d["scale"] == "masked *", "scale"),
    # The keys of a cache have no dim of their own that an input could have.
    _when(
        lambda d: d["keys"] == "cache"
        and (
            d["bias"].startswith("given")
            or not {d["mask"], d["mask 2"]}.isdisjoint(("padding", "given", "random"))
        )
        and d["dynamic"] != "b",
        "dynamic",
    ),
    _when(lambda d: d["applied"] == "times" and d["bias"] == "given -inf", "applied"),  # NaN
    # -1e9 - log Σ exp(-1e9) is 0, and the weights sum to more than 1, by eager's rounding alone.
    _when(lambda d: d["softmax"] == "lse" and d["fill"] in ("-1e9", "-1e4"), fill="lowest"),
    # Two lowest floats that are added overflow before they are scaled, and not after.
    _when(
        lambda d: (d["scale"], d["bias"], d["fill"]) == ("masked *", "given lowest", "lowest"),
        "bias",
    ),
    # Weights that never are a tensor.
    _when(lambda d: d["softmax"] == "late", "after"),
    _when(lambda d: d["softmax"] == "queries" and d["after"] == "talking", "after"),
    _when(lambda d: d["layout"] not in ("bhsd",) and d["after"] == "talking", "after"),
    _when(lambda d: d["layout"] == "loop" and d["after"] == "returned", "after"),
    _when(lambda d: d["layers"] == "2" and d["after"] == "returned", "after"),
    _when(lambda d: d["sizes"] == "one head" and d["after"] == "talking", "after"),
    _when(lambda d: d["sizes"] == "one feature" and d["norm"] == "layer norm", "norm"),
)  # fmt: skip
