"""From queries, keys and values to the output: scores, weights, context, and what stands around."""

from __future__ import annotations

from tests.fuzz.masking import FILLS, applied, bias, masks
from tests.fuzz.writer import Writer


def attend(w: Writer) -> None:
    """Leaves `o`, (B, S, H, D) or (S, B, H, D), from `q`, `k` and `v`."""
    kept = masks(w)
    added = bias(w)
    if w.is_("scale", "of data"):
        w.run(f"factor = y.mean({(1, 2) if w.is_('order', 'batch') else (0, 2)}) + 1.0")
    if w.is_("layout", "loop"):
        w.run("heads = []", "for h in range(H):")
        w.indent = "    "
        at = "[:, h]" if w.heads_first else "[:, :, h]"
        shared = at.replace("h", "0") if w.is_("groups", "one") else at
        w.run(f"q_h, k_h, v_h = q{at}, k{shared}, v{shared}")
    if w.is_("softmax", "sdpa"):
        _operator(w, kept, added)
    else:
        _scores(w, kept, added)
        _weights(w)
        _after(w, kept)
        _context(w)
    _headed(w)


def _operator(w: Writer, kept: list[tuple[str, str]], added: tuple[str, str] | None) -> None:
    options = []
    w.is_("groups", "repeat") and w.is_("layout", "bhsd") and options.append("enable_gqa=True")
    w.is_("after", "dropout") and options.append("dropout_p=0.0")
    if w.is_("scale", "none", "query", "key", "both"):
        options.append("scale=1.0")
    elif w.is_("scale", "pow"):
        options.append("scale=0.5")
    causal = w.is_("mask", "causal") and w.is_("mask 2", "none") and w.is_("causal", "arange")
    if causal and added is None and not w.is_("keys", "cache"):
        options.append("is_causal=True")
    elif kept:
        keep = " & ".join(w.placed(*each) for each in kept)
        if added is None and w.is_("fill", "-inf"):
            w.run(f"mask = {keep}")
        else:
            w.run(f"mask = torch.where({keep}, 0.0, {FILLS[w.draw['fill']]})")
            if added is not None:
                w.run(f"mask = mask + {w.placed(*added)}")
        options.append("attn_mask=mask")
    elif added is not None:
        options.append(f"attn_mask={w.placed(*added)}")
    w.run(f"o = F.scaled_dot_product_attention({', '.join(['q, k, v', *options])})")


def _scores(w: Writer, kept: list[tuple[str, str]], added: tuple[str, str] | None) -> None:
    w.run(f"scores = {_product(w)}")
    factors = {
        "scores *": "scores * 0.3",
        "scores /": "scores / math.sqrt(D)",
        "rsqrt": "scores * torch.rsqrt(torch.tensor(float(D)))",
        "pow": f"scores * {'q_h' if w.is_('layout', 'loop') else 'q'}.shape[-1] ** -0.5",
        "per head": f"scores * {w.placed('self.temperature', 'bhst')}",
        "of data": f"scores * {w.placed('factor[:, None, None, None]', 'b1st')}",
    }
    if w.is_("scale", "per head"):
        w.make("self.temperature = nn.Parameter(torch.empty(1, H, 1, 1))")
        if w.by_axes == "nst":
            factors["per head"] = "scores * self.temperature.expand(b, H, 1, 1).reshape(-1, 1, 1)"
    if w.by_axes == "nst":
        factors["of data"] = "scores * factor.repeat_interleave(H)[:, None, None]"
    if w.draw["scale"] in factors:
        w.run(f"scores = {factors[w.draw['scale']]}")
    if w.is_("softcap", "tanh"):
        w.run("scores = 3.0 * torch.tanh(scores / 3.0)")
    if added is not None:
        w.run(f"scores = scores + {w.placed(*added)}")
    for name, axes in kept:
        placed = w.placed(name, axes)
        if placed != name:
            w.run(f"shown = {placed}")
        w.run(f"scores = {applied(w, 'shown' if placed != name else name)}")
    if w.is_("scale", "masked *"):
        w.run("scores = scores * 0.3")


def _product(w: Writer) -> str:
    match w.draw["layout"]:
        case "bshd":
            keys = "btd" if w.is_("groups", "one") else "bthd"
            k = "k[:, :, 0]" if w.is_("groups", "one") else "k"
            return f'torch.einsum("bshd,{keys}->{w.by_axes}", q, {k})'
        case "merged":
            if w.is_("scale", "alpha"):
                nothing = "torch.zeros(1, 1, 1, dtype=q.dtype)"
                return f"torch.baddbmm({nothing}, q, k.mT, beta=0.0, alpha=0.3)"
            return "torch.bmm(q, k.transpose(1, 2))"
        case "column":
            return "k @ q.mT" if not w.is_("groups", "one") else "torch.matmul(k, q.mT)"
        case "loop":
            return "q_h @ k_h.mT"
        case "bhsd" if w.is_("groups", "view"):
            w.run("grouped = q.unflatten(1, (G, H // G))")
            return "(grouped @ k[:, :, None].mT).flatten(1, 2)"
        case "bhsd" if w.is_("product", "einsum"):
            return 'torch.einsum("bhid,bhjd->bhij", q, k)'
        case "bhsd" if w.is_("product", "sum"):
            return "(q[:, :, :, None] * k[:, :, None]).sum(-1)"
    return "torch.matmul(q, k.transpose(-1, -2))"


def _weights(w: Writer) -> None:
    axis = w.key_axis
    top = f"scores.amax({axis}, keepdim=True)"
    total = f"e.sum({axis}, keepdim=True)"
    match w.draw["softmax"]:
        case "float":
            w.run(f"w = F.softmax(scores, dim={axis}, dtype=torch.float32).to(x.dtype)")
        case "log":
            w.run(f"w = F.log_softmax(scores, dim={axis}).exp()")
        case "exp":
            w.run("e = scores.exp()", f"w = e / {total}")
        case "max":
            w.run(f"e = (scores - {top}).exp()", f"w = e / {total}")
        case "lse":
            w.run(f"w = (scores - scores.logsumexp({axis}, keepdim=True)).exp()")
        case "late":
            w.run(f"w = (scores - {top}).exp()", f"total = w.sum({axis}, keepdim=True)")
        case "one more":
            w.run(f"top = {top}", "e = (scores - top).exp()")
            w.run(f"w = e / ({total} + (-top).exp())")
        case "sink":
            w.make("self.sink = nn.Parameter(torch.empty(1, H, 1, 1))")
            w.run("sink = self.sink.expand(b, H, s, 1)")
            placed = w.placed("sink", "bhst", keys="1")
            w.run(f"w = torch.cat([scores, {placed}], {axis}).softmax({axis})")
            w.run(f"w = w.narrow({axis}, 0, t)")
        case "queries":
            w.run(f"w = scores.softmax({w.query_axis})")
        case _:
            w.run(f"w = scores.softmax({axis})")


def _after(w: Writer, kept: list[tuple[str, str]]) -> None:
    total = f"w.sum({w.key_axis}, keepdim=True)"
    match w.draw["after"]:
        case "dropout":
            w.run("w = F.dropout(w, 0.1, self.training)")
        case "renormalised":
            w.run(f"w = w / {total}")
        case "masked":
            w.run(f"w = w * {w.placed(*kept[0])}")
        case "masked, renormalised":
            w.run(f"w = w * {w.placed(*kept[0])}.float()", f"w = w / ({total} + 1e-9)")
        case "guarded":
            w.run("w = torch.nan_to_num(w)")
        case "where any":
            kept_any = f"{w.placed(*kept[0])}.any({w.key_axis}, keepdim=True)"
            w.run(f"w = torch.where({kept_any}, w, 0.0)")
        case "gates":
            w.make("self.gates = nn.Parameter(torch.empty(1, H, 1, 1))")
            w.run("gates = self.gates.expand(b, H, 1, 1)")
            placed = w.placed("gates", "bhst")
            placed = "gates.reshape(b * H, 1, 1)" if w.by_axes == "nst" else placed
            w.run(f"w = w * {placed}")
        case "talking":
            w.make("self.mix = nn.Parameter(torch.empty(H, H))")
            w.run('w = torch.einsum("bhst,hg->bgst", w, self.mix)')


def _context(w: Writer) -> None:
    late = w.is_("softmax", "late")
    match w.draw["layout"]:
        case "bshd":
            one = w.is_("groups", "one")
            values, v = ("btd", "v[:, :, 0]") if one else ("bthd", "v")
            w.run(f'o = torch.einsum("{w.by_axes},{values}->bshd", w, {v})')
            total = {
                "bhst": "total.transpose(1, 2)",
                "bsht": "total",
                "bsth": "total.transpose(2, 3)",
            }[w.by_axes]
            late and w.run(f"o = o / {total}")
        case "column":
            w.run("o = w.mT @ v")
            late and w.run("o = o / total.mT")
        case "bhsd" if w.is_("groups", "view"):
            w.run("o = (w.unflatten(1, (G, H // G)) @ v[:, :, None]).flatten(1, 2)")
            late and w.run("o = o / total")
        case layout:
            v = "v_h" if layout == "loop" else "v"
            einsum = w.is_("values", "einsum") and not w.is_("groups", "one")
            w.run(f'o = torch.einsum("bhij,bhjd->bhid", w, {v})' if einsum else f"o = w @ {v}")
            late and w.run("o = o / total")


def _headed(w: Writer) -> None:
    match w.draw["layout"]:
        case "bshd" if not w.is_("softmax", "sdpa"):
            pass
        case "hbsd":
            w.run("o = o.permute(1, 2, 0, 3)")
        case "merged":
            w.run("o = o.view(b, H, s, D).transpose(1, 2)")
        case "loop":
            w.run("heads.append(o)")
            w.indent = ""
            w.run("o = torch.stack(heads, 2)")
        case _:
            w.run("o = o.transpose(1, 2)")
    if w.is_("order", "sequence"):
        w.run("o = o.transpose(0, 1)")


def put_out(w: Writer) -> None:
    """From `o` to what is returned: gates, the projection, the residual and the MLP."""
    if w.is_("gate", "sigmoid"):
        w.make("self.gate = nn.Linear(M, M)")
        w.run("o = o * torch.sigmoid(self.gate(y)).unflatten(-1, (H, D))")
    match w.draw["output"]:
        case "einsum":
            w.make("self.out = nn.Parameter(torch.empty(H, D, M))")
            w.run('o = torch.einsum("xyhd,hdm->xym", o, self.out)')
        case "sum of heads":
            w.make("self.out = nn.ModuleList(nn.Linear(D, M) for _ in range(H))")
            w.run("o = sum(one(o[:, :, h]) for h, one in enumerate(self.out))")
        case "linear":
            w.make("self.out = nn.Linear(M, M)")
            w.run("o = self.out(o.flatten(2))")
        case _:
            w.run("o = o.flatten(2)")
    if not w.is_("around", "none"):
        w.run("o = x + o")
    if w.is_("around", "post-norm"):
        w.make("self.behind = nn.LayerNorm(M)")
        w.run("o = self.behind(o)")
    if w.is_("around", "mlp"):
        w.make("self.norm = nn.LayerNorm(M)")
        w.make("self.up, self.down = nn.Linear(M, 2 * M), nn.Linear(2 * M, M)")
        w.run("o = o + self.down(F.gelu(self.up(self.norm(o))))")
    results = ["o"]
    w.is_("after", "returned") and results.append("w")
    w.is_("keys", "cache") and results.append("*presents")
    w.run(f"return {', '.join(results)}")
