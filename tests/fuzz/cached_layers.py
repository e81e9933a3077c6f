"""The layers of a drawn decoder: projections, places, the cache, and the attention over it."""

from __future__ import annotations

from tests.fuzz.grammar import OPTIONS, Draw


class Lines:
    """A decoder in the making."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.layers = int(draw["layers"])
        self.width = 32 if "weights" in OPTIONS[draw["option"]] else 16  # fewer bits need 32
        self.functions: list[str] = []
        self.made: list[str] = []  # of a layer
        self.steps: list[str] = []
        self.above: list[str] = []  # of the model
        self.around: list[str] = []

    def is_(self, name: str, *options: str) -> bool:
        return self.draw[name] in options


def token_axes(w: Lines) -> tuple[int, int]:
    own = {"bphd": (1, 1), "bpm": (1, 1), "keys across": (3, 2), "pbhd": (0, 0)}
    return own.get(w.draw["axes"], (2, 2))


_TURNS = {
    "half": """\
def turned(x, places):
    angles = places[:, None, :, None] * 0.3 ** torch.arange(D // 2)
    angles = torch.cat([angles, angles], -1)
    one, two = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-two, one], -1) * angles.sin()""",
    "interleaved": """\
def turned(x, places):
    angles = places[:, None, :, None] * 0.3 ** torch.arange(D // 2)
    one, two = x[..., ::2], x[..., 1::2]
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([one * cos - two * sin, one * sin + two * cos], -1).flatten(-2)""",
    "partial": """\
def turned(x, places):
    angles = places[:, None, :, None] * 0.3 ** torch.arange(D // 4)
    angles = torch.cat([angles, angles], -1)
    x, rest = x.split(D // 2, -1)
    one, two = x.chunk(2, -1)
    x = x * angles.cos() + torch.cat([-two, one], -1) * angles.sin()
    return torch.cat([x, rest], -1)""",
}


def layer(w: Lines) -> None:
    run, make = w.steps.append, w.made.append
    make("self.before, self.output = nn.LayerNorm(M), nn.Linear(H * D, M)")
    run("b, s, _ = x.shape")
    run("y = self.before(x)")
    if w.is_("projection", "joint"):
        make("self.joint = nn.Linear(M, (H + 2 * G) * D)")
        run("q, k, v = self.joint(y).split([H * D, G * D, G * D], -1)")
    else:
        make("self.query, self.key = nn.Linear(M, H * D), nn.Linear(M, G * D)")
        make("self.value = nn.Linear(M, G * D)")
        run("q, k, v = self.query(y), self.key(y), self.value(y)")
    run("q = q.view(b, s, H, D).transpose(1, 2)")
    run("k, v = (each.view(b, s, G, D).transpose(1, 2) for each in (k, v))")
    if w.is_("norm", "rms"):
        make("self.query_norm, self.key_norm = nn.RMSNorm(D), nn.RMSNorm(D)")
        run("q, k = self.query_norm(q), self.key_norm(k)")
    elif w.is_("norm", "l2"):
        run("q, k = 3.0 * F.normalize(q, dim=-1), F.normalize(k, dim=-1)")
    if w.draw["places"] in _TURNS:
        w.functions.append(_TURNS[w.draw["places"]])
        run("q = turned(q, places)")
        w.is_("turned", "new keys") and run("k = turned(k, places)")
    _grow(w)
    if w.is_("turned", "all keys"):
        run("k = turned(k, key_places)")
    _attend(w)
    run("o = self.output(o.transpose(1, 2).flatten(2))")
    if w.is_("around", "mlp", "parallel"):
        make("self.norm = nn.LayerNorm(M)")
        make("self.up, self.down = nn.Linear(M, 2 * M), nn.Linear(2 * M, M)")
    match w.draw["around"]:
        case "residual":
            run("x = x + o")
        case "none":
            run("x = o")
        case "mlp":
            run("x = x + o")
            run("x = x + self.down(F.gelu(self.up(self.norm(x))))")
        case _:
            run("x = x + o + self.down(F.silu(self.up(y)))")
    run("return x, key, value")


def _grow(w: Lines) -> None:
    """`key` and `value` as they are kept, and `k` and `v` (B, G, P + S, D) of them."""
    run = w.steps.append
    there, back = {
        "bphd": ("{0}.transpose(1, 2)", "{0}.transpose(1, 2)"),
        "bpm": ("{0}.transpose(1, 2).flatten(2)", "{0}.unflatten(2, (G, D)).transpose(1, 2)"),
        "pbhd": ("{0}.permute(2, 0, 1, 3)", "{0}.permute(1, 2, 0, 3)"),
    }.get(w.draw["axes"], ("{0}", "{0}"))
    across = w.is_("axes", "keys across")
    key, value = "k.mT" if across else there.format("k"), there.format("v")
    if w.is_("cache", "object", "transformers"):
        run(f"key, value = past.update({key}, {value}, i)")
    else:
        one, two = token_axes(w)
        run(f"key = torch.cat([past[0], {key}], {one})")
        run(f"value = torch.cat([past[1], {value}], {two})")
    run(f"k, v = {'key.mT' if across else back.format('key')}, {back.format('value')}")


def _attend(w: Lines) -> None:
    """`o` (B, H, S, D) of `q`, `k` and `v`."""
    run = w.steps.append
    viewed = w.is_("grouped", "view") and not w.is_("groups", "all")
    if not w.is_("groups", "all") and not viewed:
        spelled = {
            "repeat": "each.repeat_interleave(H // G, 1)",
            "expand": "each[:, :, None].expand(-1, -1, H // G, -1, -1).flatten(1, 2)",
        }[w.draw["grouped"]]
        run(f"k, v = ({spelled} for each in (k, v))")
    fill = {"-inf": 'float("-inf")', "lowest": "torch.finfo(x.dtype).min"}
    low = fill.get(w.draw["fill"], "-1e9")
    biased = w.draw["places"] in ("alibi", "slopes", "relative")
    if w.is_("softmax", "sdpa"):
        if biased or not w.is_("fill", "-inf"):
            run(f"mask = torch.where(visible, {'bias' if biased else '0.0'}, {low})")
        run(f"mask = {'mask' if biased or not w.is_('fill', '-inf') else 'visible'}")
        run("o = F.scaled_dot_product_attention(q, k, v, mask)")
        return
    scale = {"query": "q = q * D**-0.5", "both": "q, k = q * D**-0.25, k * D**-0.25"}
    if w.draw["scale"] in scale:
        run(scale[w.draw["scale"]])
    product = "q @ k.mT"
    if viewed:
        product = "(q.unflatten(1, (G, H // G)) @ k[:, :, None].mT).flatten(1, 2)"
    after = {"scores /": " / math.sqrt(D)", "scores *": " * 0.4"}.get(w.draw["scale"], "")
    run(f"scores = {product}{after}")
    if w.is_("softcap", "tanh"):
        run("scores = 3.0 * torch.tanh(scores / 3.0)")
    if biased:
        run("scores = scores + bias")
    if w.is_("softmax", "masked exp"):
        run("scores = scores.masked_fill(~visible, -1e9)")
        run("e = (scores - scores.amax(-1, keepdim=True)).exp() * visible")
        run("w = e / e.sum(-1, keepdim=True).clamp(min=1e-9)")
    else:
        _weights(w, low)
    if viewed:
        run("o = (w.unflatten(1, (G, H // G)) @ v[:, :, None]).flatten(1, 2)")
    else:
        run("o = w @ v")


def _weights(w: Lines, low: str) -> None:
    run = w.steps.append
    match w.draw["applied"]:
        case "fill":
            run(f"scores = scores.masked_fill(~visible, {low})")
        case "where":
            run(f"scores = torch.where(visible, scores, {low})")
        case _:
            run(f"scores = scores + torch.where(visible, 0.0, {low})")
    if w.is_("sinks", "joined"):
        w.made.append("self.sink = nn.Parameter(torch.empty(1, H, 1, 1))")
        run("scores = torch.cat([scores, self.sink.expand(b, H, s, 1)], -1)")
    match w.draw["softmax"]:
        case "float":
            run("w = F.softmax(scores, dim=-1, dtype=torch.float32).to(x.dtype)")
        case "max":
            run("e = (scores - scores.amax(-1, keepdim=True)).exp()")
            run("w = e / e.sum(-1, keepdim=True)")
        case "log":
            run("w = F.log_softmax(scores, dim=-1).exp()")
        case _:
            run("w = scores.softmax(-1)")
    if w.is_("sinks", "joined"):
        run("w = w[..., :-1]")
    match w.draw["guard"]:
        case "nan to num":
            run("w = torch.nan_to_num(w)")
        case "any":
            run("w = torch.where(visible.any(-1, keepdim=True), w, 0.0)")
