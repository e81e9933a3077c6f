"""fuse-experts: a mixture of experts, however rows reach them, becomes one op."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from attngraph.analysis.experts import gates
from attngraph.analysis.experts.products import GROUPED, Stored, is_gathered
from attngraph.analysis.experts.reading import (
    Choice,
    Expert,
    Mixture,
    Unread,
    choices,
    mixture_of,
    thresholds,
)
from attngraph.analysis.experts.router import decides, fill_of, softmax_near, softmax_of
from attngraph.analysis.experts.rows_chosen import RowsChosen, rows_chosen
from attngraph.analysis.experts.uniform import switch_in
from attngraph.analysis.values.intervals import Intervals
from attngraph.dialect.quantized import BLOCK
from attngraph.ir import Builder, Dim, Graph, Node, Remark, TensorType, Value, remark_on
from attngraph.ir.dead import eliminate_dead_code
from attngraph.ir.dims import divide, product, substitute, symbols_of
from attngraph.ir.slices import depends_on
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.manager import GraphPass
from attngraph.passes.rewriting.trials import turns

_FEW = 2
"""A form that multiplies each row with all experts takes less time than the operator does if rows
take more than one of so many: with 2 of 8 it took 2.4 to 3.3 times as long."""
_SWITCHES = "what is done to rows may be otherwise for others, or at other numbers of them"
_NO_KERNEL = "the operator is for float32"
_IS_FASTER = "products of the rows that an expert takes, or of all rows, are faster as written"
_SIGNED = "its weights may be negative"
_TIED = "its experts are those whose scores reach the least of the largest, more where some tie"
_NO_GATE = "the weights of experts that a row doesn't take aren't shown to be 0"
_UNEQUAL = "it isn't the weighted sum of what its experts give"
_REASSOCIATES = "The experts of a row are summed by one operator, which normalises their weights."


class FuseExperts(GraphPass, name="fuse-experts", exact=False):
    """Proposes x, the experts' matrices and weights of each choice, and makes the op if trials in
    which each expert is chosen, and left out, by some row give the same.

    Left as they are: experts with an activation that the operator lacks, weights that may be
    negative, large matrices in grouped products, and all that trials can't tell. The op is for a
    target that has the operator; with `in_codes` its matrices are to be codes of 4 bits.
    """

    in_codes: bool = False

    def run(self, graph: Graph) -> list[Remark]:
        every: dict[tuple[int, int], Checked] = {}
        for choice in choices(graph):
            size = choice.experts, choice.count
            if size not in every:
                kinds = ("plain", "equal", "zero", *turns(*size))
                every[size] = Checked(graph, self.name, kinds, depth=None)
            found = mixture_of(graph, choice)
            if found is None:
                continue
            remark = _read(every[size], found, self.in_codes)
            every[size].remarks.append(remark)
            eliminate_dead_code(graph)
        remarks = [remark for checked in every.values() for remark in checked.remarks]
        for choice, comparison in thresholds(graph):
            if mixture_of(graph, choice) is not None:
                remarks.append(_kept(choice, _TIED, comparison))
        ties = (_tied(choice) for choice in choices(graph))
        return [*remarks, *map(_by_rows, rows_chosen(graph)), *filter(None, ties)]


def _tied(choice: Choice) -> Remark | None:
    """Scores may be chosen that a fill has made equal: no op says which of them it takes."""
    fill = fill_of(choice)
    if fill is None:
        return None
    reason = (
        f"It may choose among scores that are filled with {fill:g}, which are equal: eager and the "
        "file may take different ones of these."
    )
    hint = "Fill with -inf, and leave at least as many others as are chosen."
    node = choice.node
    return remark_on(node, "note", "tied-choice", reason, hint, name=node.outputs[-1].name)


def _by_rows(chosen: RowsChosen) -> Remark:
    """Tells that rows are chosen among those of a sequence, which no operator does."""
    node, count = chosen.softmax or chosen.node, chosen.count
    rows = f"{count} row{'' if count == 1 else 's'}"
    if chosen.experts > 1:
        reason = (
            f"A mixture of {chosen.experts} experts, each of which takes {rows} of its choice, "
            "stays as it is written: in no operator do experts choose."
        )
        hint = "Where rows come one by one, have each row choose: scores.topk(count, -1)."
    else:
        reason = (
            f"A block that {rows} of a sequence go through stays as it is written, and is computed "
            "for those alone."
        )
        hint = "Where rows come one by one, choose by each row's own score: scores > 0."
    return remark_on(node, "named", "experts-kept", reason, hint, name=node.outputs[-1].name)


def _read(checked: Checked, found: Mixture | Unread, in_codes: bool) -> Remark:
    """Makes the op, if a mixture is one; what became of it."""
    if isinstance(found, Unread):
        return _kept(found.choice, found.why, found.node)
    if found.x.dtype != torch.float32 or found.result.dtype != torch.float32:
        return _kept(found.choice, _NO_KERNEL, found.experts[0].down.node)
    if not (in_codes and _fits_codes(found)) and _is_slower(checked.graph, found):
        return _kept(found.choice, _IS_FASTER, found.experts[0].down.node)
    place = _place(found.choice)
    why = _fuse(checked, found)
    if why is not None:
        return _kept(found.choice, *why)
    reason = f"{_described(found.choice)} is one operator."
    return Remark("named", "experts", reason, **place)


def _kept(choice: Choice, why: str, node: Node) -> Remark:
    """Why a mixture stays as it is written."""
    reason = f"{_described(choice)} stays as it is written: {why}."
    return Remark("named", "experts-kept", reason, **_place(choice), blamed=node.outputs[0].name)


def _described(choice: Choice) -> str:
    return f"A mixture of {choice.experts} experts, of which a row takes {choice.count},"


def _place(choice: Choice) -> dict[str, Any]:
    """The router's softmax, or what chooses."""
    node = softmax_near(choice) or choice.node
    return {"loc": node.loc, "op": node.op, "node": node.outputs[-1].name}


def _is_slower(graph: Graph, mixture: Mixture) -> bool:
    """Whether onnxruntime's `MoE` may take longer on the CPU than what is written.

    With 8 and 64 experts of 8,000 to 4,700,000 elements one row took 1.5 to 0.24 of the time that
    products of the rows of each expert take, 16 rows 0.8 to 5 of it, 256 rows 1.4 to 2 and 1024
    rows 1.1 to 1.2. So these stay unless there is one row. Matrices that are gathered for
    each row took 8 to 48 times as long as the operator; all experts on every row, as `_FEW` says.
    """
    choice, (up, *_) = mixture.choice, mixture.experts[0].ups
    if is_gathered(up):
        return False
    known = {dim for size in mixture.x.shape for dim in symbols_of(size)}
    brought = {dim for size in up.rows.shape for dim in symbols_of(size)}
    if up.node.op not in GROUPED and brought <= known:
        return choice.count * _FEW > choice.experts
    highs = {name: info.high for name, info in graph.dims.items() if info.high is not None}
    rows = product(mixture.x.shape[:-1])
    return any(str(dim) not in highs for dim in symbols_of(rows)) or substitute(rows, highs) > 1


def _fits_codes(mixture: Mixture) -> bool:
    """Whether both matrices can be cut into blocks of codes.

    The operator's kernel then reads an eighth of the bytes: at one row it took 0.3 of the time of
    products in floats, at 16 and 256 rows 1.2 (docs/recognition.md has the sizes).
    """
    widths = mixture.x.shape[-1], mixture.experts[0].down.matrices.shape[2]
    return all(isinstance(width, int) and width % BLOCK == 0 for width in widths)


def _fuse(checked: Checked, mixture: Mixture) -> tuple[str, Node] | None:
    """Makes the op with one of the possible weights; else says why not, and a node to blame."""
    bounds = Intervals()
    switches: list[Node] = []
    assert mixture.result.producer is not None
    why = _UNEQUAL, mixture.result.producer
    for weights, is_gate in _weights(mixture):
        switch = switch_in(mixture, mixture.given(), weights, is_gate=is_gate)
        if switch is not None:
            switches.append(switch)
            continue
        if is_gate and not gates.is_gate(mixture.choice, weights):
            assert weights.producer is not None
            why = _NO_GATE, weights.producer
            continue
        dtype = mixture.x.dtype
        routers, signed = _routers(mixture.choice, weights, is_gate, bounds, dtype)
        if signed is not None:
            why = _SIGNED, signed
        for router in routers:
            pairs = [(mixture.result, _made(checked, mixture, router))]
            leaves = [mixture.x, *router.leaves(mixture.choice)]
            if checked.is_equal(pairs, leaves):
                is_made = checked.replace(pairs, leaves=leaves, reassociates=_REASSOCIATES)
                return None if is_made else why
            checked.abandon(pairs)
    after = [node for node in switches if depends_on(node.outputs, [mixture.choice.node])]
    if switches and why[0] == _UNEQUAL:
        why = _SWITCHES, [*after, *switches][0]
    return why


@dataclass(frozen=True)
class _Softmax:
    """A router whose weights the op computes: the softmax of the scores."""

    scores: Value
    normalized: bool

    def leaves(self, choice: Choice) -> list[Value]:
        return [self.scores]


@dataclass(frozen=True)
class _Given:
    """A router that gives the weights of what it chooses."""

    weights: Value

    def leaves(self, choice: Choice) -> list[Value]:
        return [choice.scores, self.weights]


@dataclass(frozen=True)
class _Gate:
    """A router that gives a weight for every expert, 0 for those that it doesn't choose; both
    follow from `scores`.
    """

    weights: Value
    scores: Value

    def leaves(self, choice: Choice) -> list[Value]:
        return [self.scores]


_Router: TypeAlias = _Softmax | _Given | _Gate


def _weights(mixture: Mixture) -> Iterator[tuple[Value, bool]]:
    """What may be the weights of the choices, and what may be a gate."""
    for weights in mixture.weights():
        yield weights, False
    for gate in mixture.gates():
        yield gate, True


def _routers(
    choice: Choice, weights: Value, is_gate: bool, bounds: Intervals, dtype: torch.dtype
) -> tuple[list[_Router], Node | None]:
    """What may give these weights in the dtype of the rows; what is to blame where they may be
    negative.
    """
    scores = softmax_of(choice, weights)
    found: list[_Router] = []
    if scores is not None and scores.dtype == dtype:
        found += [_Softmax(scores, True), _Softmax(scores, False)]
    if bounds.of(weights)[0] < 0:
        return found, weights.producer if scores is None else None
    if weights.dtype != dtype:
        return found, None
    source = decides(choice, weights) if is_gate else None
    if source is not None:
        found.append(_Gate(weights, source))
    elif not is_gate:
        found.append(_Given(weights))
    return found, None


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
        return [_rows(build, router.scores, choice.experts)]
    weights, indices = router.weights, _rows(build, choice.indices, choice.count)
    if isinstance(router, _Given):
        return [_rows(build, weights, choice.count), indices]
    return [build("aten.gather", _rows(build, weights, choice.experts), indices, dim=1), indices]


def _rows(build: Builder, value: Value, width: Dim) -> Value:
    """(…, width) as (T, width)."""
    shape = [divide(product(value.shape), width), width]
    return _shaped(build, value, shape)


def _shaped(build: Builder, value: Value, shape: Sequence[Dim | None]) -> Value:
    known = [dim for dim in shape if dim is not None]
    return build.reshape(value, known)


def _by_number(experts: Sequence[Expert]) -> list[Expert]:
    """The experts by the number that a selection says, else in the order of the program."""
    numbers = [expert.down.matrices.expert for expert in experts]
    if any(number is None for number in numbers):
        return list(experts)
    return sorted(experts, key=lambda expert: expert.down.matrices.expert or 0)


def _all_there(parts: Sequence[Sequence[Stored | None]]) -> list[list[Stored]]:
    """Biases, if each product has one; those of some only make the proposal differ."""
    found = [[part for part in item if part is not None] for item in parts]
    whole = all(len(item) == len(given) for item, given in zip(found, parts, strict=True))
    return found if whole else []
