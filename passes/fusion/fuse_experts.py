"""fuse-experts: a mixture of experts, however rows reach them, becomes one op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch

from attngraph.analysis.experts.products import GROUPED, Stored
from attngraph.analysis.experts.reading import Choice, Expert, Mixture, choices, mixtures
from attngraph.analysis.values.intervals import Intervals
from attngraph.analysis.values.matching import producer
from attngraph.ir import Builder, Dim, Graph, Remark, TensorType, Value
from attngraph.ir.dead import eliminate_dead_code
from attngraph.ir.dims import divide, product, same_shape
from attngraph.ir.traits import SOFTMAX
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.manager import register
from attngraph.passes.rewriting.trials import turns

_LARGE = 1 << 17
"""Elements of an expert's matrix from which grouped products outrun the operator on the CPU: its
kernel multiplies with matrices as they are stored, others are packed when a file is opened. With 8
experts of 459,000 elements they took 0.7 of its time, with 64 of 65,000 1.2 to 1.8."""
_REASSOCIATES = "The experts of a row are summed by one operator, which normalises their weights."


@register
@dataclass(frozen=True)
class FuseExperts:
    """Proposes x, the experts' matrices and weights of each choice, and makes the op if trials in
    which each expert is chosen, and left out, by some row give the same.

    Left as they are: experts with an activation that the operator lacks, weights that may be
    negative, large matrices in grouped products, and all that trials can't tell. The op is for a
    target that has the operator.
    """

    name: ClassVar[str] = "fuse-experts"
    exact: ClassVar[bool] = False

    def run(self, graph: Graph) -> list[Remark]:
        every: dict[tuple[int, int], Checked] = {}
        for choice in choices(graph):
            size = choice.experts, choice.count
            if size not in every:
                kinds = ("plain", "equal", "zero", *turns(*size))
                every[size] = Checked(graph, self.name, kinds, depth=None)
            for mixture in mixtures(graph, choice):
                if _is_grouped(mixture) and _largest(mixture) >= _LARGE:
                    break
                if _fuse(graph, every[size], mixture):
                    eliminate_dead_code(graph)
                    break
        return [remark for checked in every.values() for remark in checked.remarks]


def _is_grouped(mixture: Mixture) -> bool:
    """Whether rows are sorted by expert and multiplied in groups: no more than is chosen."""
    return all(expert.down.node.op in GROUPED for expert in mixture.experts)


def _largest(mixture: Mixture) -> int:
    ups = [up.matrices for expert in mixture.experts for up in expert.ups]
    return max(matrices.shape[1] * matrices.shape[2] for matrices in ups)


def _fuse(graph: Graph, checked: Checked, mixture: Mixture) -> bool:
    """Whether the op with one of the mixture's possible weights gives its result, and was made."""
    bounds = Intervals()
    for weights, router in mixture.weights(graph):
        softmax = producer(router, *SOFTMAX)
        scores = router if softmax is None else softmax.inputs[0]
        assert scores is not None
        forms: list[_Router] = [_Softmax(scores, True), _Softmax(scores, False)]
        if bounds.of(weights)[0] >= 0:
            forms.append(_Given(router, weights))
        for form in forms:
            pairs = [(mixture.result, _made(checked, mixture, form))]
            leaves = [mixture.x, form.decides]
            if checked.is_equal(pairs, leaves):
                return checked.replace(pairs, leaves=leaves, reassociates=_REASSOCIATES)
            checked.abandon(pairs)
    return False


@dataclass(frozen=True)
class _Softmax:
    """A router whose weights the op computes: the softmax of what `decides`."""

    decides: Value
    normalized: bool


@dataclass(frozen=True)
class _Given:
    """A router that gives `weights`, which follow from what `decides`."""

    decides: Value
    weights: Value


_Router: TypeAlias = _Softmax | _Given


def _made(checked: Checked, mixture: Mixture, router: _Router) -> Value:
    """The nodes of the op, in front of what it is to replace."""
    choice, first = mixture.choice, mixture.experts[0]
    result = mixture.result
    assert result.producer is not None
    after = list(checked.graph)[list(checked.graph).index(result.producer) + 1 :]
    build = Builder(checked.graph, after[0] if after else None, result.producer.loc)
    act = first.activation
    order = act.places(sum(up.width for up in first.ups))

    def joined(name: str, parts: Sequence[Sequence[Stored]], axis_order: list[int] | None) -> Value:
        """One constant of all experts' `parts`, each expert's beside each other."""
        sources = list(dict.fromkeys(part.constant for item in parts for part in item))

        def compute(given: Sequence[torch.Tensor]) -> torch.Tensor:
            data = dict(zip(sources, given, strict=True))
            rows = [
                torch.cat([part.read(data[part.constant]) for part in item], 1) for item in parts
            ]
            whole = torch.cat(rows, 0)
            return (whole if axis_order is None else whole[:, axis_order]).contiguous()

        shape = [choice.experts, sum(part.shape[1] for part in parts[0]), *parts[0][0].shape[2:]]
        kind = TensorType(sources[0].dtype, tuple(shape))
        return checked.derive(f"{sources[0].name}.{name}", kind, sources, compute)

    experts = _by_number(mixture.experts)
    ups = [[up.matrices for up in expert.ups] for expert in experts]
    up_biases = [[up.bias for up in expert.ups] for expert in experts]
    down_biases = [[expert.down.bias] for expert in experts]
    inputs: list[Value | None] = [
        _rows(build, mixture.x, mixture.x.shape[-1]),
        *_routed(build, choice, router),
        joined("up", ups, order),
        joined("down", [[expert.down.matrices] for expert in experts], None),
    ]
    has_up, has_down = _all_there(up_biases), _all_there(down_biases)
    inputs.append(joined("bias", has_up, order) if has_up else None)
    inputs.append(joined("bias", has_down, None) if has_down else None)
    numbers = {"alpha": act.alpha, "beta": act.beta, "limit": act.limit}
    if isinstance(router, _Softmax):
        choosing = {"count": choice.count, "normalized": router.normalized}
        made = build("attn.routed_moe", *inputs, activation=act.kind, **choosing, **numbers)
    else:
        made = build("attn.moe", *inputs, activation=act.kind, **numbers)
    return _shaped(build, made, result.shape)


def _routed(build: Builder, choice: Choice, router: _Router) -> list[Value]:
    """The inputs of the op that say which experts a row takes."""
    if isinstance(router, _Softmax):
        return [_rows(build, router.decides, choice.experts)]
    return [_rows(build, value, choice.count) for value in (router.weights, choice.indices)]


def _rows(build: Builder, value: Value, width: Dim) -> Value:
    """(…, width) as (T, width)."""
    shape = [divide(product(value.shape), width), width]
    return _shaped(build, value, shape)


def _shaped(build: Builder, value: Value, shape: Sequence[Dim | None]) -> Value:
    known = [dim for dim in shape if dim is not None]
    if same_shape(value.shape, known):
        return value
    return build("aten.reshape", value, shape=known)


def _by_number(experts: Sequence[Expert]) -> list[Expert]:
    """By the number that a selection says, else in the order of the program."""
    numbers = [expert.down.matrices.expert for expert in experts]
    if any(number is None for number in numbers):
        return list(experts)
    return sorted(experts, key=lambda expert: expert.down.matrices.expert or 0)


def _all_there(parts: Sequence[Sequence[Stored | None]]) -> list[list[Stored]]:
    """Biases, if each product has one; those of some only make the proposal differ."""
    found = [[part for part in item if part is not None] for item in parts]
    whole = all(len(item) == len(given) for item, given in zip(found, parts, strict=True))
    return found if whole else []
