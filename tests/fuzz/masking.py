"""What hides keys, and what is added to scores."""

from __future__ import annotations

from tests.fuzz.writer import LONGEST, Writer

FILLS = {
    "-inf": 'float("-inf")',
    "-1e9": "-1e9",
    "lowest": "torch.finfo(x.dtype).min",
    "-1e4": "-1e4",
}
_OTHER = {"strict": -1, "lenient": 1}  # near misses of causal: diagonals that they keep more


def masks(w: Writer) -> list[tuple[str, str]]:
    """Bool tensors, true where a query may look, each with its axes."""
    found = []
    for place, choice in (("keep", "mask"), ("keep_2", "mask 2")):
        if not w.is_(choice, "none"):
            code, axes = _mask(w, w.draw[choice], place)
            w.run(f"{place} = {code}")
            found.append((place, axes))
    if len(found) < 2 or w.is_("joined", "one by one"):
        return found
    joined = {
        "and": "keep & keep_2",
        "logical": "torch.logical_and(keep, keep_2)",
        "times": "(keep.float() * keep_2.float()).bool()",
        "or": "keep | keep_2",
    }
    w.run(f"keep = {joined[w.draw['joined']]}")
    return [("keep", max((axes for _, axes in found), key=len))]


def _mask(w: Writer, kind: str, place: str) -> tuple[str, str]:
    """Code for a mask, and "st" or "b1st"."""
    rows, columns = _positions(w)
    match kind:
        case "causal" | "strict" | "lenient":
            return _causal(w, _OTHER.get(kind, 0)), "st"
        case "anti-causal":
            return f"{rows} <= {columns}", "st"
        case "window":
            return f"({rows} - {columns} < 3) & ({rows} >= {columns})", "st"
        case "band":
            return f"({rows} - {columns}).abs() <= 2", "st"
        case "chunk":
            return f"{rows} // 3 == {columns} // 3", "st"
        case "prefix":
            return f"({rows} >= {columns}) | ({columns} < 2)", "st"
        case "lengths":
            return f"{columns} < {w.take('lengths', 'b:lengths')}[:, None, None, None]", "b1st"
        case "segments":
            ids = w.take("ids", "b s:segments")
            return f"{ids}[:, None, :, None] == {ids}[:, None, None, :]", "b1st"
        case "given":
            return w.take(f"{place}_given", "b 1 s t:mask"), "b1st"
        case "random":
            return w.take(f"{place}_given", "s t:mask"), "st"
        case "queries":
            return f"{w.take('rows_kept', 'b s:padding')}[:, None, :, None]", "b1st"
    return _padding(w), "b1st"


def _padding(w: Writer) -> str:
    match w.draw["padding"]:
        case "int":
            return f"{w.take('present', 'b t:int padding')}[:, None, None, :] != 0"
        case "float":
            return f"{w.take('present', 'b t:float padding')}[:, None, None, :] > 0.5"
        case "hidden":
            return f"~{w.take('hidden', 'b t:hidden')}[:, None, None, :]"
        case "pad id":
            return f"({w.take('words', 'b t:ids')} != 3)[:, None, None, :]"
        case "until the end id":
            ended = w.take("words", "b t:ended ids")
            return f"(({ended} == 2).cumsum(-1) == 0)[:, None, None, :]"
        case "threshold":
            return f"({w.take('salience', 'b t:salience')}.sigmoid() > 0.5)[:, None, None, :]"
        case "table":
            w.make('self.register_buffer("real", torch.arange(12) != 3)')
            return f"self.real[{w.take('words', 'b t:ids')}][:, None, None, :]"
    return f"{w.take('present', 'b t:padding')}[:, None, None, :]"


def _positions(w: Writer) -> tuple[str, str]:
    if "columns = torch.arange(t)" not in w.steps:
        past = " + p" if w.is_("keys", "cache") else ""
        w.run(f"rows = torch.arange(s)[:, None]{past}", "columns = torch.arange(t)")
    return "rows", "columns"


def _causal(w: Writer, more: int) -> str:
    """Key t is seen by query s where t <= s + past + more."""
    past = "p" if w.is_("keys", "cache") else ""
    after = " + ".join([part for part in (past, str(more) if more else "") if part]) or "0"
    match w.draw["causal"]:
        case "tril":
            return f"torch.ones(s, t, dtype=torch.bool).tril({after})"
        case "triu":
            return f"~torch.ones((s, t), dtype=torch.bool).triu({after} + 1)"
        case "cumsum":
            ones = "torch.ones(s, t)"
            return f"{ones}.cumsum(1) <= {ones}.cumsum(0) + {after}"
        case "zeros":
            return f'torch.full((s, t), float("-inf")).triu({after} + 1) == 0'
        case "transposed":
            return f"torch.ones(t, s).triu(-({after})).T > 0"
        case "buffer":
            square = f"torch.ones({LONGEST}, {LONGEST}).tril({more})"
            w.make(f'self.register_buffer("causal", {square})')
            return f"self.causal[{'p : p + s' if past else ':s'}, :t] == 1"
    return f"columns <= rows + {more}" if more else "rows >= columns"


def bias(w: Writer) -> tuple[str, str] | None:
    """What is added to the scores, and its axes."""
    match w.draw["bias"]:
        case "alibi":
            rows, columns = _positions(w)
            w.run("slopes = 2.0 ** -(torch.arange(H).float() + 1.0)")
            w.run(f"bias = (slopes[:, None, None] * ({columns} - {rows}))[None]")
        case "table":
            rows, columns = _positions(w)
            w.make("self.table = nn.Embedding(9, H)")
            w.run(f"distance = ({columns} - {rows}).clamp(-4, 4) + 4")
            w.run("bias = self.table(distance).permute(2, 0, 1)[None]")
        case "distance":
            rows, columns = _positions(w)
            w.run(f"bias = -0.3 * ({rows} - {columns}).abs().float()")
            return "bias", "st"
        case "sliced":
            w.make(f"self.table = nn.Parameter(torch.empty(H, {LONGEST}, {LONGEST}))")
            w.run("bias = self.table[None, :, :s, :t]")
        case "given":
            w.run(f"bias = {w.take('given_bias', 'b h s t')}")
        case "given -inf" | "given lowest":
            kind = w.draw["bias"].partition(" ")[2]
            w.run(f"bias = {w.take('given_bias', f'b 1 s t:additive {kind}')}")
            return "bias", "b1st"
        case _:
            return None
    return "bias", "bhst"


def applied(w: Writer, keep: str) -> str:
    """Code for the scores where a placed mask keeps them."""
    fill = FILLS[w.draw["fill"]]
    match w.draw["applied"]:
        case "where":
            return f"torch.where({keep}, scores, {fill})"
        case "add where":
            return f"scores + torch.where({keep}, 0.0, {fill})"
        case "add filled":
            zeros = f"torch.zeros_like({keep}, dtype=x.dtype)"
            return f"scores + {zeros}.masked_fill(~{keep}, {fill})"
        case "add float":
            return f"scores + (1.0 - {keep}.float()) * {fill}"
        case "times":
            return f"scores * {keep}.float() + (1.0 - {keep}.float()) * {fill}"
    return f"scores.masked_fill(~{keep}, {fill})"
