"""fuse-attention: every softmax over keys and every SDPA node becomes one `attn.attention`.

The reading is in site.py, logits.py, contraction.py and axes.py; here the result is written down.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from attngraph.ir import Builder, Graph, Node, Remark, Value
from attngraph.ir.graph import fuse_locs
from attngraph.passes.axes import Atom, Axes, Operand, is_symbolic, resolve
from attngraph.passes.logits import ABSORBING_FILL, Bias, Declined, Factor, Mask
from attngraph.passes.manager import register
from attngraph.passes.materialize import cost, materialize
from attngraph.passes.roles import Stage, cheapest, stages
from attngraph.passes.site import SDPA, SOFTMAXES, Site, understand


@register
@dataclass(frozen=True)
class FuseAttention:
    """Fuses each attention it can read exactly; every other one gets a reason."""

    name: ClassVar[str] = "fuse-attention"

    def run(self, graph: Graph) -> list[Remark]:
        build = Builder(graph)
        remarks = []
        for anchor in list(graph):
            if anchor.graph is None or (anchor.op not in SOFTMAXES and anchor.op != SDPA):
                continue
            found = understand(anchor)
            result = _emit(graph, build, found) if isinstance(found, Site) else found
            if isinstance(result, Declined):
                remarks.append(_declined(anchor, result))
            elif result is not None:
                remarks.append(result)
        return remarks


def _declined(anchor: Node, declined: Declined) -> Remark:
    blamed = declined.node or anchor
    return Remark(
        "declined",
        declined.code,
        declined.reason,
        anchor.loc,
        op=anchor.op,
        hint=declined.hint,
        node=anchor.outputs[0].name,
        blamed=f"{blamed.op} at {blamed.loc}",
    )


def _static_size(atoms: Sequence[Atom]) -> int | None:
    sizes = [atom.size for atom in resolve(atoms)]
    if any(is_symbolic(size) for size in sizes):
        return None
    return math.prod(int(size) for size in sizes)


def _emit(graph: Graph, build: Builder, site: Site) -> Remark | Declined:
    roles = site.roles
    kv_heads, groups = _static_size(roles.kv_heads), _static_size(roles.groups)
    if kv_heads is None or groups is None:
        return Declined("heads-dynamic", "The number of heads is only known at run time.")
    chosen = _operands(site)
    if chosen is None:
        return Declined("axes-not-attention", "The operands can't be laid out as heads.")
    query, key, value = chosen
    scale = site.scale * query.factor * key.factor
    if not math.isfinite(scale) or scale == 0:
        return Declined("scale-unknown", f"The scores are scaled by {scale:g}.")
    keys = set(resolve(roles.keys))
    if any(keys & set(factor.operand.atoms) for factor in site.factors):
        return Declined(
            "scores-times-tensor",
            "The scores are multiplied by a tensor that differs from key to key.",
            hint="Multiply the keys by it instead.",
        )
    finite = [step for step in site.steps if isinstance(step, Mask) and math.isfinite(step.fill)]
    weak = [step for step in finite if step.fill > ABSORBING_FILL]
    if weak and (len({step.fill for step in finite}) > 1 or _bias_after(site.steps, weak[0])):
        return Declined(
            "weak-fill",
            f"Scores are filled with {weak[0].fill:g} and then changed again, so a row in which "
            "everything is masked depends on both.",
            hint="Fill with -inf or torch.finfo(dtype).min, or mask last.",
        )
    outer, inner = _gains(site)
    if outer is None or inner is None:
        return Declined(
            "weights-times-tensor",
            "The attention weights are multiplied by a tensor that differs from query to query and "
            "from key to key.",
            hint="Mask the scores before the softmax instead.",
        )
    heads = set(resolve((*roles.kv_heads, *roles.groups)))
    if site.sinks is not None and not set(site.sinks.atoms) <= heads:
        return Declined("sink-per-row", "The sink differs within a head, which no op can do.")
    loc = fuse_locs(site.nodes, site.anchor)
    build.at(site.root, loc)
    dtype = max((s.operand.value.dtype for s in chosen), key=lambda d: torch.finfo(d).bits)
    q = _as(build, materialize(build, query.operand, roles.query), dtype)
    for factor in site.factors:
        q = _times(build, q, factor, roles.query)
    if scale < 0:
        q, scale = build("aten.neg", q), -scale
    k = _as(build, materialize(build, key.operand, roles.key), dtype)
    v = _as(build, materialize(build, value.operand, roles.value), dtype)
    for gain in inner:
        v = _times(build, v, gain, roles.value)
    bias = _bias(build, site, q.dtype)
    mask = _mask(build, site)
    sinks = None
    if site.sinks is not None:
        sinks = _as(build, materialize(build, site.sinks, (roles.scores[1],)), q.dtype)
    node = build.node(
        "attn.attention",
        q,
        k,
        v,
        bias,
        mask,
        sinks,
        heads=kv_heads * groups,
        kv_heads=kv_heads,
        scale=scale,
        causal=site.causal,
        softcap=site.softcap,
        masked_rows=site.masked_rows,
        weights=site.weights is not None,
    )
    packed = node.outputs[0]
    for gain in outer:
        packed = _times(build, packed, gain, roles.context)
    if site.gain != 1.0:
        packed = build("aten.mul.Scalar", packed, other=site.gain)
    context = materialize(build, Operand(packed, roles.context), site.output)
    graph.replace_uses(site.root.output, _as(build, context, site.root.output.dtype))
    if site.weights is not None:
        scores = Operand(node.outputs[1], roles.scores)
        weights = materialize(build, scores, site.weights.axes)
        graph.replace_uses(site.anchor.output, _as(build, weights, site.anchor.output.dtype))
        graph.sort()
    return Remark(
        "fused",
        "attention",
        _describe(site, kv_heads * groups, kv_heads),
        loc,
        op="attn.attention",
        node=node.outputs[0].name,
        details={"heads": kv_heads * groups, "kv_heads": kv_heads, "scale": scale},
    )


def _operands(site: Site) -> tuple[Stage, Stage, Stage] | None:
    """The cheapest stages of Q, K and V, all of one type where casts can be left out."""
    value = [stage for stage in site.value if stage.factor == 1.0]
    sides = list(zip((site.query, site.key, value), _targets(site), strict=True))
    wanted = dict.fromkeys(stage.operand.value.dtype for stage in value)
    for dtype in [*wanted, None]:
        found = [
            cheapest([s for s in side if dtype in (None, s.operand.value.dtype)], target)
            for side, target in sides
        ]
        if found[0] is not None and found[1] is not None and found[2] is not None:
            return found[0], found[1], found[2]
    return None


def _times(build: Builder, value: Value, factor: Factor, axes: Axes) -> Value:
    spread = materialize(build, factor.operand, axes, broadcast=False)
    op = "aten.div.Tensor" if factor.divides else "aten.mul.Tensor"
    return build(op, value, _as(build, spread, value.dtype))


def _gains(site: Site) -> tuple[list[Factor] | None, list[Factor] | None]:
    """What multiplies the weights, as (factors of the context, factors of the values)."""
    keys = set(resolve(site.roles.keys))
    rows = set(resolve((*site.roles.queries, *site.roles.groups)))
    outer = [gain for gain in site.gains if not keys & set(gain.operand.atoms)]
    inner = [gain for gain in site.gains if keys & set(gain.operand.atoms)]
    if any(rows & set(gain.operand.atoms) for gain in inner):
        return None, None
    return outer, inner


def _targets(site: Site) -> tuple[Axes, Axes, Axes]:
    return site.roles.query, site.roles.key, site.roles.value


def _describe(site: Site, heads: int, kv_heads: int) -> str:
    parts = [f"{heads} heads"]
    if kv_heads != heads:
        parts.append(f"{kv_heads} key-value heads")
    if site.causal:
        parts.append("causal")
    biases = sum(isinstance(step, Bias) for step in site.steps)
    masks = len(site.steps) - biases
    parts += [f"{biases} bias"] * bool(biases) + [f"{masks} mask"] * bool(masks)
    parts += ["softcap"] * bool(site.softcap) + ["weights returned"] * bool(site.weights)
    return ", ".join(parts)


def _bias_after(steps: Sequence[Bias | Mask], mask: Mask) -> bool:
    return any(isinstance(step, Bias) for step in steps[steps.index(mask) + 1 :])


def _as(build: Builder, value: Value, dtype: torch.dtype) -> Value:
    return value if value.dtype == dtype else build("aten._to_copy", value, dtype=dtype)


def _broadcastable(operand: Operand, scores: Axes) -> tuple[Operand, Axes]:
    """The cheapest stage of a bias or mask, and its axes: size 1 where it has none."""
    best: tuple[int, int] | None = None
    chosen: tuple[Operand, Axes] | None = None
    for index, stage in enumerate(stages(operand)):
        if stage.factor != 1.0:
            break
        have = set(stage.operand.atoms)
        target = tuple(dim if have & set(resolve(dim)) else () for dim in scores)
        needed = cost(stage.operand, target)
        if needed is not None and (best is None or (needed, index) < best):
            best, chosen = (needed, index), (stage.operand, target)
    if chosen is None:
        raise ValueError(f"{operand.value!r} has axes that the scores lack.")
    return chosen


def _placed(build: Builder, site: Site, operand: Operand) -> Value:
    chosen, target = _broadcastable(operand, site.roles.scores)
    return materialize(build, chosen, target)


def _bias(build: Builder, site: Site, dtype: torch.dtype) -> Value | None:
    """The sum of the biases, in their order; finite fills become one, absorbing all else."""
    total: Value | None = None
    for step in site.steps:
        if isinstance(step, Bias):
            term = _as(build, _placed(build, site, step.operand), dtype)
            if step.factor != 1.0:
                term = build("aten.mul.Scalar", term, other=step.factor)
        elif math.isfinite(step.fill):
            kept = _placed(build, site, step.operand)
            zero = build.constant(torch.zeros((), dtype=dtype), "zero")
            fill = build.constant(torch.tensor(min(step.fill, ABSORBING_FILL), dtype=dtype), "fill")
            choices = (zero, fill) if step.keep else (fill, zero)
            term = build("aten.where.self", kept, *choices)
        else:
            continue
        total = term if total is None else build("aten.add.Tensor", total, term)
    return total


def _mask(build: Builder, site: Site) -> Value | None:
    """True where every -inf mask lets a query attend."""
    total: Value | None = None
    for step in site.steps:
        if isinstance(step, Bias) or math.isfinite(step.fill):
            continue
        term = _placed(build, site, step.operand)
        if not step.keep:
            term = build("aten.logical_not", term)
        total = term if total is None else build("aten.logical_and", total, term)
    return total
