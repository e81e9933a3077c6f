"""From the input to queries, keys and values: projections, heads, norms, positions, groups."""

from __future__ import annotations

from tests.fuzz.writer import LONGEST, Writer

_PACKED = ("chunk", "split", "unbind", "index", "slice", "packed heads")


def project(w: Writer) -> None:
    """Leaves `q`, `k` and `v` in the layout in which the scores are computed, and b, s, t."""
    _sizes(w)
    source = "c" if w.is_("keys", "cross") else "y"
    if w.is_("projection", *_PACKED):
        _packed(w, source)
    else:
        for name, x, heads in (("q", "y", "H"), ("k", source, "G"), ("v", source, "G")):
            _one(w, name, x, heads)
    if not w.is_("projection", "unbind", "packed heads", "einsum", "by head"):
        for name, heads in (("q", "H"), ("k", "G"), ("v", "G")):
            w.run(f"{name} = {_split(w, name, heads)}")
    if w.is_("order", "sequence"):
        w.run("q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)")
    if w.heads_first:
        w.run("q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)")
    _norm(w)
    if not w.is_("rotary", "none"):
        _rotary(w)
    _cache(w)
    if not w.is_("groups", "none", "view", "one"):
        _groups(w)
    _scale(w)
    _arrange(w)


def _sizes(w: Writer) -> None:
    leading = "b s" if w.is_("order", "batch") else "s b"
    w.take("x", f"{leading} m")
    w.run(f"{', '.join(leading.split())}, _ = x.shape")
    if w.is_("keys", "cross"):
        w.take("c", f"{leading.replace('s', 't')} m")
        w.run(f"t = c.shape[{leading.split().index('s')}]")
    elif w.is_("keys", "cache"):
        order = "b g p d" if w.heads_first else "b p g d"
        w.take("past_k", order)
        w.take("past_v", order)
        w.run(f"p = past_k.shape[{order.split().index('p')}]", "t = p + s")
    else:
        w.run("t = s")
    pre = w.is_("around", "pre-norm")
    if pre:
        w.make("self.before = nn.LayerNorm(M)")
    w.run("y = self.before(x)" if pre else "y = x")


def _packed(w: Writer, source: str) -> None:
    """One product for all, or for keys and values where they come from elsewhere."""
    names, width, x = ["q", "k", "v"], "(H + 2 * G) * D", "y"
    if source == "c":
        _one(w, "q", "y", "H", kind="linear")
        names, width, x = ["k", "v"], "2 * G * D", "c"
        if w.is_("projection", "unbind", "packed heads"):
            w.run("q = q.unflatten(-1, (H, D))")
    w.make(f"self.packed = nn.Linear(M, {width})")
    w.run(f"packed = self.packed({x})")
    count, listed = len(names), ", ".join(names)
    widths = {"q": "H * D", "k": "G * D", "v": "G * D"}
    match w.draw["projection"]:
        case "chunk":
            w.run(f"{listed} = packed.chunk({count}, -1)")
        case "split":
            w.run(f"{listed} = packed.split([{', '.join(widths[n] for n in names)}], -1)")
        case "unbind":
            w.run(f"{listed} = packed.unflatten(-1, ({count}, H, D)).unbind(-3)")
        case "index":
            w.run(f"packed = packed.unflatten(-1, ({count}, H * D))")
            w.run(*(f"{name} = packed[..., {i}, :]" for i, name in enumerate(names)))
        case "slice":
            start = "0"
            for name in names:
                end = f"{start} + {widths[name]}"
                w.run(f"{name} = packed[..., {start} : {end}]")
                start = end
        case _:
            w.run(f"{listed} = packed.unflatten(-1, (H, {count} * D)).chunk({count}, -1)")


def _one(w: Writer, name: str, x: str, heads: str, kind: str = "") -> None:
    match kind or w.draw["projection"]:
        case "linear":
            w.make(f"self.{name} = nn.Linear(M, {heads} * D)")
            w.run(f"{name} = self.{name}({x})")
        case "no bias":
            w.make(f"self.{name} = nn.Linear(M, {heads} * D, bias=False)")
            w.run(f"{name} = self.{name}({x})")
        case "matmul":
            w.make(f"self.w{name} = nn.Parameter(torch.empty(M, {heads} * D))")
            w.make(f"self.{name}_bias = nn.Parameter(torch.empty({heads} * D))")
            w.run(f"{name} = {x} @ self.w{name} + self.{name}_bias")
        case "einsum":
            w.make(f"self.w{name} = nn.Parameter(torch.empty(M, {heads}, D))")
            w.run(f'{name} = torch.einsum("xym,mhd->xyhd", {x}, self.w{name})')
        case "conv":
            w.make(f"self.{name} = nn.Conv1d(M, {heads} * D, 1)")
            to, back = "transpose(1, 2)", "transpose(1, 2)"
            if w.is_("order", "sequence"):
                to, back = "permute(1, 2, 0)", "permute(2, 0, 1)"
            w.run(f"{name} = self.{name}({x}.{to}).{back}")
        case "by head":
            w.make(f"self.{name} = nn.ModuleList(nn.Linear(M, D) for _ in range({heads}))")
            w.run(f"{name} = torch.stack([one({x}) for one in self.{name}], 2)")
        case "none":
            w.run(f"{name} = {x}")


def _split(w: Writer, name: str, heads: str) -> str:
    """Code for (·, ·, heads · D) as (·, ·, heads, D)."""
    match w.draw["heads"]:
        case "view" if w.is_("projection", "linear", "no bias", "matmul"):
            return f"{name}.view({name}.shape[0], {name}.shape[1], {heads}, D)"
        case "reshape":
            return f"{name}.reshape(*{name}.shape[:2], -1, D)"
        case "interleaved":
            return f"{name}.unflatten(-1, (D, {heads})).transpose(-1, -2)"
        case "stack":
            return f"torch.stack({name}.chunk({heads}, -1), 2)"
    return f"{name}.unflatten(-1, ({heads}, D))"


def _norm(w: Writer) -> None:
    match w.draw["norm"]:
        case "layer norm":
            w.make("self.q_norm, self.k_norm = nn.LayerNorm(D), nn.LayerNorm(D)")
            w.run("q, k = self.q_norm(q), self.k_norm(k)")
        case "rms":
            for n in "qk":
                w.make(f"self.{n}_gain = nn.Parameter(torch.empty(D))")
                mean = f"{n}.pow(2).mean(-1, keepdim=True)"
                w.run(f"{n} = {n} * torch.rsqrt({mean} + 1e-6) * self.{n}_gain")
        case "rms of all":  # one mean for all heads, as OLMo 2 has
            axes = (1, 3) if w.heads_first else (2, 3)
            for n in "qk":
                mean = f"{n}.pow(2).mean({axes}, keepdim=True)"
                w.run(f"{n} = {n} * torch.rsqrt({mean} + 1e-6)")
        case "l2":
            w.run("q, k = 4.0 * F.normalize(q, dim=-1), F.normalize(k, dim=-1)")


def _rotary(w: Writer) -> None:
    """Turns q and k; a cache holds keys that were turned at their own positions."""
    partial = w.is_("rotary", "partial")
    width = "D // 3 * 2" if partial else "D"
    w.make(f"self.turned = {width}")
    powers = "torch.arange(0, self.turned, 2).float() / self.turned"
    frequencies = f"1.0 / 100.0 ** ({powers})"
    if w.is_("rotary tables", "buffer"):
        table = f"torch.outer(torch.arange({LONGEST}).float(), {frequencies})"
        w.make(f'self.register_buffer("angles", {table})')
        w.run(f"angles = self.angles[{'p : p + s' if w.is_('keys', 'cache') else ':s'}]")
    else:
        start = " + p" if w.is_("keys", "cache") else ""
        w.run(f"frequencies = {frequencies}")
        w.run(f"angles = (torch.arange(s){start}).float()[:, None] * frequencies")
    if not w.heads_first:
        w.run("angles = angles[:, None]")
    for n in "qk":
        w.run(f"part = {n}[..., : self.turned]" if partial else f"part = {n}")
        match w.draw["rotary"]:
            case "interleaved":
                w.run("even, odd = part[..., 0::2], part[..., 1::2]")
                first, second = "even * angles.cos() - odd * angles.sin()", "even * angles.sin()"
                w.run(f"turned = [{first}, {second} + odd * angles.cos()]")
                w.run("part = torch.stack(turned, -1).flatten(-2)")
            case "complex":
                w.run("pairs = torch.view_as_complex(part.unflatten(-1, (-1, 2)).contiguous())")
                w.run("pairs = pairs * torch.polar(torch.ones_like(angles), angles)")
                w.run("part = torch.view_as_real(pairs).flatten(-2)")
            case _:
                w.run("cos = torch.cat([angles.cos(), angles.cos()], -1)")
                w.run("sin = torch.cat([angles.sin(), angles.sin()], -1)")
                w.run("one, two = part.chunk(2, -1)")
                w.run("part = part * cos + torch.cat([-two, one], -1) * sin")
        rest = f"torch.cat([part, {n}[..., self.turned :]], -1)"
        w.run(f"{n} = {rest}" if partial else f"{n} = part")


def _cache(w: Writer) -> None:
    if w.is_("keys", "cache"):
        axis = 2 if w.heads_first else 1
        w.run(f"k, v = torch.cat([past_k, k], {axis}), torch.cat([past_v, v], {axis})")
        w.run("presents = k, v")


def _groups(w: Writer) -> None:
    """As many heads of keys as of queries."""
    if w.is_("softmax", "sdpa") and w.is_("groups", "repeat") and w.is_("layout", "bhsd"):
        return  # the operator does it
    axis = 1 if w.heads_first else 2
    for n in "kv":
        match w.draw["groups"]:
            case "repeat":
                w.run(f"{n} = {n}.repeat_interleave(H // G, {axis})")
            case "tile":  # head h has the keys of h % G
                times = "1, H // G, 1, 1" if axis == 1 else "1, 1, H // G, 1"
                w.run(f"{n} = {n}.repeat({times})")
            case _:
                more = "b, G, H // G, t, D" if axis == 1 else "b, t, G, H // G, D"
                at = "[:, :, None]" if axis == 1 else "[:, :, :, None]"
                w.run(f"{n} = {n}{at}.expand({more}).flatten({axis}, {axis + 1})")


def _scale(w: Writer) -> None:
    match w.draw["scale"]:
        case "query":
            w.run("q = q * D**-0.5")
        case "key":
            w.run("k = k / math.sqrt(D)")
        case "both":
            w.run("q, k = q * D**-0.25, k * D**-0.25")


def _arrange(w: Writer) -> None:
    match w.draw["layout"]:
        case "hbsd":
            w.run(*(f"{n} = {n}.permute(2, 0, 1, 3)" for n in "qkv"))
        case "merged":
            for n, length in (("q", "s"), ("k", "t"), ("v", "t")):
                heads = f"{n}.transpose(1, 2)"
                if n != "q" and w.is_("groups", "one"):
                    heads += f".expand(b, H, {length}, D)"
                w.run(f"{n} = {heads}.reshape(b * H, {length}, D)")
        case "bshd" if w.is_("softmax", "sdpa"):
            w.run("q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)")
