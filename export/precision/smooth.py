"""Outliers of activations, moved out of what is rounded: features are divided by powers of two.

A row that is rounded to int8 has one step, which its largest feature sets. Where the features come
out of weights, and only linears read them, feature j may be divided by s_j there and multiplied in
the columns of the linears (SmoothQuant, Xiao et al. 2023):

    W (γ ⊙ x̂ + β)      =  (W diag s) ((γ / s) ⊙ x̂ + β / s)             a norm
    W_o A (W_v x + b)  =  (W_o diag s) A ((W_v / s) x + b / s)         A mixes keys, not features
    W (g ⊙ (U x + b))  =  (W diag s) (g ⊙ ((U / s) x + b / s))         a gate, of any form
    W relu(U x + b)    =  (W diag s) relu((U / s) x + b / s)           s > 0

With s a power of two nothing is rounded: the moved model computes the same floats. Anything else
between the two, another reader, or a weight that stands elsewhere too keeps its numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from attngraph.analysis.values.affine import read_linear
from attngraph.analysis.values.intervals import Intervals
from attngraph.analysis.values.matching import only_read_by, same_type
from attngraph.analysis.values.weights import Owners, is_known, weights_of
from attngraph.dialect.quantized import row_steps
from attngraph.export.precision.quantize import is_one_sided
from attngraph.ir import Graph, Node, Value, interpret
from attngraph.ir.ops import attribute, input_of, op_def
from attngraph.ir.traits import FEATURE_NORM

_ZERO = ord("m")
_FARTHEST = 12
"""The largest exponent of a factor, which a letter of the alphabet stands for."""
_STRENGTHS = (0.25, 0.5, 0.75, 1.0)
_ROWS = 128
"""The most rows of a sample on which strengths are compared."""
_WORTH = 0.95
"""What a move must leave of a linear's error."""


@dataclass(frozen=True)
class Site:
    """Features that may be scaled: `source` makes them, `readers` are all that read the `value`.

    A feature of the source is `repeats` times one of the value: heads of `width` features share it.
    """

    value: Value
    source: Node
    readers: tuple[Node, ...]
    repeats: int = 1
    width: int = 1

    def spread(self, numbers: torch.Tensor) -> torch.Tensor:
        """Numbers of the source's features, as those of the value's."""
        grouped = numbers.reshape(-1, 1, self.width)
        return grouped.expand(-1, self.repeats, -1).reshape(-1)

    def joined(self, numbers: torch.Tensor) -> torch.Tensor:
        """The largest of the value's features that one of the source's stands for."""
        return numbers.reshape(-1, self.repeats, self.width).amax(1).reshape(-1)


def sites(graph: Graph) -> Iterator[Site]:
    """All values whose features may be scaled."""
    owners, seen = Owners(graph), set[Value]()
    for node in graph:
        value = node.inputs[0] if node.op == "aten.linear" else None
        if value is None or value in seen or value in graph.outputs:
            continue
        seen.add(value)
        readers = tuple(user for user, at in value.uses if user.op == "aten.linear" and at == 0)
        if len(readers) == len(value.uses) and all(_is_free(each, owners) for each in readers):
            for site in _above(graph, Site(value, node, readers), value, owners):
                yield site
                break


def _is_free(node: Node, owners: Owners) -> bool:
    """Whether the weight of a linear is known, and its own."""
    linear = read_linear(node)
    return linear is not None and linear.is_known and owners.is_sole(linear.weight)


def _above(graph: Graph, site: Site, value: Value, owners: Owners) -> Iterator[Site]:
    """The site with the sources that the value's features come from, each as it is scaled."""
    node = value.producer
    if node is None or value.dtype is not torch.float32:
        return
    if node.op in FEATURE_NORM:
        if value is node.outputs[0] and _norm_weights(node) is not None:
            yield Site(site.value, node, site.readers, site.repeats, site.width)
    elif node.op == "aten.linear":
        if _is_free(node, owners):
            yield Site(site.value, node, site.readers, site.repeats, site.width)
    elif node.op == "aten.relu":
        yield from _through(graph, site, node, 0, owners)
    elif node.op == "aten.mul.Tensor":
        for at in (1, 0):
            other = node.inputs[at]
            if other is not None and same_type(other, node.output):
                yield from _through(graph, site, node, at, owners)
    elif node.op == "attn.attention" and value is node.outputs[0] and site.repeats == 1:
        heads, groups = attribute(node, "heads"), attribute(node, "kv_heads")
        held = input_of(node, "past_value") is not None or len(node.outputs) > 2
        width = value.shape[-1]
        if not held and isinstance(width, int):
            grouped = Site(value, node, site.readers, heads // groups, width // heads)
            yield from _through(graph, grouped, node, 2, owners)


def _through(graph: Graph, site: Site, node: Node, at: int, owners: Owners) -> Iterator[Site]:
    operand = node.inputs[at]
    if operand is not None and only_read_by(graph, operand, node):
        yield from _above(graph, site, operand, owners)


def _norm_weights(norm: Node) -> dict[str, Value | None] | None:
    """Its weight and bias; None where they are computed, or are of more than the features."""
    found = weights_of(norm)
    known = all(value is None or is_known(value) for value in (found or {}).values())
    return found if known else None


def exponents(graph: Graph, samples: Sequence[Sequence[torch.Tensor]]) -> dict[str, str]:
    """By the name of each value that gains from it, the exponents of its source's divisors.

    What is gained is measured on the samples: the error of the readers' products. A letter stands
    for an exponent, m for 0.
    """
    found = {site.value: site for site in sites(graph)}
    rows: dict[Value, list[torch.Tensor]] = {value: [] for value in found}

    def observe(value: Value, tensor: torch.Tensor) -> None:
        if value in rows:
            given = tensor.reshape(-1, tensor.shape[-1]).float()
            given = given[given.isfinite().all(-1)]
            peaks = given.abs().amax(0, keepdim=True) if len(given) else given
            step = max(1, -(-len(given) * len(samples) // _ROWS))
            rows[value].append(torch.cat([given[::step], peaks]))

    for sample in samples:
        interpret(graph, sample, observe=observe)
    known = Intervals()
    chosen = {
        value: _best(site, rows[value], one_sided=is_one_sided(value, known))
        for value, site in found.items()
    }
    return {value.name: _text(each) for value, each in chosen.items() if each is not None}


def _best(site: Site, parts: Sequence[torch.Tensor], *, one_sided: bool) -> torch.Tensor | None:
    """The exponents of the source's features that leave the least error; None for no gain."""
    given = torch.cat(list(parts)) if parts else torch.empty(0)
    if not len(given):
        return None
    weights = [input_of(reader, "weight").data for reader in site.readers]
    matrix = torch.cat([weight.float() for weight in weights if weight is not None])
    peaks, columns = (site.joined(each.abs().amax(0)) for each in (given, matrix))
    usable = (peaks > 0) & (columns > 0)
    if not bool(usable.any()):
        return None
    best, least = None, _WORTH * _error(given, matrix, one_sided)
    for strength in _STRENGTHS:
        wanted = strength * peaks.log2() - (1 - strength) * columns.log2()
        wanted = torch.where(usable, wanted - wanted[usable].median(), 0.0)
        steps = wanted.round().clamp(-_FARTHEST, _FARTHEST)
        factors = site.spread(steps).exp2()
        error = _error(given / factors, matrix * factors, one_sided)
        if error < least:
            best, least = steps.to(torch.int8), error
    return best


def _error(x: torch.Tensor, weight: torch.Tensor, one_sided: bool) -> float:
    """The error of the product of rounded rows with a rounded weight, each with one step a row."""
    both = row_steps(x, one_sided=one_sided), row_steps(weight)
    rounded = [steps.round() * step for steps, step in both]
    return float((rounded[0] @ rounded[1].T - x @ weight.T).norm())


def move(graph: Graph, moves: Mapping[str, str]) -> int:
    """Divides features by powers of two, as `exponents` says, and multiplies the linears that read
    them. Returns how many values are moved: not those that the graph hasn't, nor whose numbers
    would leave the range of their dtype.
    """
    count = 0
    for site in list(sites(graph)):
        text = moves.get(site.value.name, "")
        factors = torch.tensor([ord(letter) - _ZERO for letter in text]).float().exp2()
        if not text or site.spread(factors).numel() != site.value.shape[-1]:
            continue
        made = list(_scaled(site, factors))
        if all(
            bool((new.double() == old.double() * by.double()).all()) for *_, old, by, new in made
        ):
            count += 1
            for node, name, *_, new in made:
                _replace(graph, node, name, new)
    return count


_Scaled = tuple[Node, str, torch.Tensor, torch.Tensor, torch.Tensor]


def _scaled(site: Site, factors: torch.Tensor) -> Iterator[_Scaled]:
    """Each constant that changes: whose, its name there, its numbers, by what, and the product."""
    found = [(reader, "weight", site.spread(factors)) for reader in site.readers]
    inverse = 1 / factors
    if site.source.op == "aten.linear":
        found.append((site.source, "weight", inverse[:, None]))
        found.append((site.source, "bias", inverse))
    else:
        weights = _norm_weights(site.source) or {}
        found += [(site.source, name, inverse) for name in weights]
    for node, name, by in found:
        value = input_of(node, name)
        if value is None and name == "bias":
            continue
        old = torch.ones_like(by) if value is None else value.data.detach()
        yield node, name, old, by, old * by


def _replace(graph: Graph, node: Node, name: str, data: torch.Tensor) -> None:
    """Gives a node another constant, which takes the name of the old one if nothing reads that."""
    at = [arg.name for arg in op_def(node.op).tensor_args].index(name)
    inputs = [*node.inputs, *[None] * (at + 1 - len(node.inputs))]
    old, inputs[at] = inputs[at], None
    graph.set_inputs(node, inputs)
    if old is not None and not old.uses:
        graph.erase_constant(old)
    known = f"{node.outputs[0].name}.{name}" if old is None else old.name
    inputs[at] = graph.add_constant(known, data)
    graph.set_inputs(node, inputs)


def _text(steps: torch.Tensor) -> str:
    return "".join(chr(_ZERO + step) for step in steps.tolist())
