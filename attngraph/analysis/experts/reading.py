"""Where a mixture of experts is: between a choice of experts for each row and the sum over them.

How rows reach their experts and come back, by loops, sorts, gathers, one-hot products or not at
all, isn't read. Which values the mixture is a function of is: the rows x, the experts that a top-k
chooses, and a weight for each. That it is the function which is proposed of them is for trials to
tell (passes/fusion/fuse_experts.py), so a reading proposes and proves nothing. That nothing between
them switches where trials don't see it is for uniform.py.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from attngraph.analysis.experts.activation import Activation, read_activation
from attngraph.analysis.experts.products import GROUPED, Product, read_product
from attngraph.analysis.walks import ahead, walk
from attngraph.errors import counted
from attngraph.ir import Dim, Graph, Node, ScalarType, TensorType, Value
from attngraph.ir.dims import divide, product, same
from attngraph.ir.ops import attribute
from attngraph.ir.slices import backward_slice
from attngraph.ir.traits import CAST, COMPARISON, GATHERED, LARGEST, LAYOUT, PART, PRODUCT

_MOST_CUTS = 12
_MOST_WEIGHTS = 24
_NO_ACTIVATION = "no operator has what stands between an expert's products"
_EMPTY = "there are no products for {experts} of it"
_OTHER_ROWS = "its experts read other than rows of one x, such as rows times their weights"


@dataclass(frozen=True, slots=True)
class Choice:
    """`node` chooses `count` of `experts` for each row, by `scores` (…, experts)."""

    node: Node
    scores: Value
    indices: Value
    experts: int
    count: int


@dataclass(frozen=True, slots=True)
class Expert:
    """The products of one expert, or of all that are stacked: up to `hidden`, and down from it."""

    ups: tuple[Product, ...]
    down: Product
    activation: Activation


@dataclass(frozen=True, slots=True)
class Unread:
    """Experts of a choice that aren't those of an operator: why, and `node` shows it."""

    choice: Choice
    node: Node
    why: str


@dataclass(frozen=True, slots=True)
class Mixture:
    """`result` may be Σ weight · expert(x); `router` is what choice and weights follow from."""

    choice: Choice
    x: Value
    result: Value
    experts: tuple[Expert, ...]

    def weights(self) -> Iterator[Value]:
        """Values with a number for each choice which, with the choices and x, decide the result.

        The one next to the result first.
        """
        choice = self.choice

        def is_weight(value: Value) -> bool:
            return choice.count == 1 or (bool(value.shape) and value.shape[-1] == choice.count)

        yield from self._deciding(product(choice.indices.shape), is_weight)

    def gates(self) -> Iterator[Value]:
        """The same, of values with a number for each expert."""
        choice = self.choice
        rows = divide(product(choice.indices.shape), choice.count)
        if rows is not None:
            yield from self._deciding(
                rows * choice.experts,
                lambda value: bool(value.shape) and value.shape[-1] == choice.experts,
            )

    def _deciding(self, count: Dim, has_form: Callable[[Value], bool]) -> Iterator[Value]:
        """Floats, so many, which with the choices and x decide the result."""
        known = self.given()

        def is_asked(value: Value) -> bool:
            kind = value.type
            if not isinstance(kind, TensorType) or not kind.dtype.is_floating_point:
                return False
            return same(product(kind.shape), count) and has_form(value)

        _, nodes = backward_slice([self.result], _stops_at(known))
        found = [value for node in reversed(nodes) for value in node.outputs if is_asked(value)]
        for weight in islice(found, _MOST_WEIGHTS):
            cut = {*known, weight}
            leaves, _ = backward_slice([self.result], _stops_at(cut))
            if weight in leaves and all(_is_given(leaf, cut) for leaf in leaves):
                yield weight

    def given(self) -> set[Value]:
        """The choices, x and its layouts."""
        return {self.choice.indices, *_layouts(self.x)}


def choices(graph: Graph) -> Iterator[Choice]:
    """Every choice of some of a static number, the last one first: groups are chosen before."""
    return (choice for choice in _largest(graph) if choice.indices.uses)


def thresholds(graph: Graph) -> Iterator[tuple[Choice, Node]]:
    """Where scores are compared with the least of their largest, which nearly is a choice, and what
    compares them: of equal scores all or none are taken.
    """
    for choice in _largest(graph):
        if choice.indices.uses:
            continue
        least = ahead(choice.node.outputs[0], lambda user: user.op in LAYOUT)
        found = (user for value in least for user in value.users if user.op in COMPARISON)
        if (comparison := next(found, None)) is not None:
            yield choice, comparison


def _largest(graph: Graph) -> Iterator[Choice]:
    """Where the largest of a static number of scores are found."""
    for node in reversed(list(graph)):
        scores = node.inputs[0] if node.inputs else None
        if scores is None or node.op not in LARGEST or not _are_scores(scores):
            continue
        rank, dim = len(scores.shape), node.attrs.get("dim", -1)
        if not rank or not isinstance(dim, int) or dim % rank != rank - 1:
            continue
        count = attribute(node, "k") if node.op == "aten.topk" else 1
        experts = scores.shape[-1]
        if not isinstance(count, int) or not isinstance(experts, int) or not 1 <= count <= experts:
            continue
        if node.op == "aten.topk" and not attribute(node, "largest"):
            continue
        if experts > 1 and rank > 1:
            yield Choice(node, scores, node.outputs[-1], experts, count)


def _are_scores(value: Value) -> bool:
    """Whether numbers are floats, and none that tell what is equal, as of a row's choices."""
    while value.dtype.is_floating_point:
        node = value.producer
        if node is None or node.op not in CAST | LAYOUT | GATHERED or node.inputs[0] is None:
            return True
        value = node.inputs[0]
    return False


def mixture_of(graph: Graph, choice: Choice) -> Mixture | Unread | None:
    """What may be the mixture of a choice, of the smallest region; None where it is no choice of
    experts.
    """
    leaves, above = backward_slice([choice.scores], lambda value: False)
    router, router_nodes = {*leaves}, {*above}
    outputs = {*choice.node.outputs}

    def stops(value: Value) -> bool:
        return (
            value in outputs
            or value.is_constant
            or value.producer in router_nodes
            or value in router
        )

    unread: Unread | None = None
    known: dict[tuple[Node, ...], _Read] = {}
    for result in islice(_cuts(graph, choice), _MOST_CUTS):
        if not result.shape or not isinstance(result.shape[-1], int):
            continue
        downs = _products([result], choice, stops)
        key = tuple(down.node for down in downs)
        if key not in known:  # one cut after the other has the same products above it
            known[key] = _experts(downs, choice, stops)
        read = known[key]
        if isinstance(read, Unread):
            unread = unread or read
            continue
        if read is None:
            continue
        x = _rows(choice, read)
        if x is None:
            unread = unread or Unread(choice, read[0].ups[0].node, _OTHER_ROWS)
            continue
        if not x.shape[-1] == result.shape[-1] == read[0].down.width:
            continue
        if same(product(x.shape[:-1]), product(result.shape[:-1])):
            return Mixture(choice, x, result, read)
    return unread


def _cuts(graph: Graph, choice: Choice) -> Iterator[Value]:
    """Values that all that depends on the choice goes through, in order."""
    waiting: dict[Value, int] = {}
    for value in choice.node.outputs:
        if value.uses:
            waiting[value] = len(value.uses)
    started = False
    for node in graph:
        if node is choice.node:
            started = True
        if not started or node is choice.node:
            continue
        read = [value for value in node.operands if value in waiting]
        if not read:
            continue
        for value in read:
            waiting[value] -= 1
            if waiting[value] == 0:
                del waiting[value]
        for value in node.outputs:
            if value in graph.outputs:
                waiting[value] = len(value.uses) + 1
            elif value.uses:
                waiting[value] = len(value.uses)
        if len(waiting) == 1 and len(node.outputs) == 1 and node.output in waiting:
            kind = node.output.type
            if isinstance(kind, TensorType) and kind.dtype.is_floating_point:
                yield node.output


_Read: TypeAlias = tuple[Expert, ...] | Unread | None


def _experts(downs: Sequence[Product], choice: Choice, stops: Callable[[Value], bool]) -> _Read:
    """Each expert's products, of the last ones; None where they aren't two after each other."""
    alone = [down for down in downs if not down.matrices.stacked]
    if len(downs) != (choice.experts if alone else 1):
        return _empty(downs, choice, stops) if alone == [*downs] else None
    found: list[Expert] = []
    activation: Activation | None = None
    for down in downs:
        ups = _products([down.rows], choice, stops)
        if not 1 <= len(ups) <= 2 or len({up.width for up in ups}) != 1:
            return None
        found_here = read_activation(ups, down.rows, activation)
        if found_here is None or activation not in (None, found_here):
            return Unread(choice, down.rows.producer or down.node, _NO_ACTIVATION)
        activation = found_here
        found.append(Expert(tuple(ups), down, activation))
    return tuple(found)


def _empty(
    downs: Sequence[Product], choice: Choice, stops: Callable[[Value], bool]
) -> Unread | None:
    """That some experts are none, as those which give a row back as it is: fewer than the others,
    each of which has two matrices of its own.
    """
    missing = choice.experts - len(downs)
    if not 0 < missing <= len(downs) or len(downs) < 2:
        return None
    if not all(1 <= len(_products([down.rows], choice, stops)) <= 2 for down in downs):
        return None
    return Unread(choice, downs[0].node, _EMPTY.format(experts=counted(missing, "expert")))


def _products(
    starts: Iterable[Value], choice: Choice, stops: Callable[[Value], bool]
) -> list[Product]:
    """The products of experts that values are computed from, but not those above them."""
    found: dict[Node, Product] = {}

    def above(value: Value) -> Iterator[Value]:
        node = value.producer
        if node is None or value.is_constant or stops(value):
            return
        read = read_product(node, choice.experts) if _may_multiply(node) else None
        if read is not None:
            found[node] = read
            return
        yield from node.operands

    for _ in walk(starts, above, limit=choice.experts * 64 + 256):
        pass
    return sorted(found.values(), key=lambda item: item.node.number)


def _may_multiply(node: Node) -> bool:
    return node.op in PRODUCT or node.op in GROUPED


def _rows(choice: Choice, experts: Sequence[Expert]) -> Value | None:
    """x: what all first products read, before rows are chosen by the choice."""
    outputs = {*choice.node.outputs}
    dependent: dict[Value, bool] = {}

    def depends(value: Value) -> bool:
        if value not in dependent:
            leaves, _ = backward_slice([value], outputs.__contains__)
            dependent[value] = any(leaf in outputs for leaf in leaves)
        return dependent[value]

    found: dict[Value, None] = {}
    for expert in experts:
        for up in expert.ups:
            value = up.rows
            while depends(value):
                node = value.producer
                assert node is not None
                floats = [
                    side
                    for side in node.inputs
                    if side is not None
                    and isinstance(side.type, TensorType)
                    and side.dtype.is_floating_point
                ]
                free = [side for side in floats if not depends(side)]
                onward = free if len(free) == 1 and len(floats) > 1 else floats
                if len(onward) != 1:
                    return None
                value = onward[0]
            found[_top(value, up.matrices.shape[2])] = None
    return next(iter(found)) if len(found) == 1 else None


def _top(value: Value, width: int) -> Value:
    """Past layouts that keep the features last."""
    return [*_layouts(value, width)][-1]


def _layouts(value: Value, width: Dim | None = None) -> list[Value]:
    """The value and those that it is a layout of, with as many features."""
    chain = [value]
    size = value.shape[-1] if width is None else width
    while (node := chain[-1].producer) is not None and node.op in LAYOUT and node.op not in PART:
        source = node.inputs[0]
        if source is None or not source.shape:
            break
        chain.append(source)
    while len(chain) > 1 and chain[-1].shape[-1] != size:
        chain.pop()
    return chain


def _stops_at(cut: Container[Value]) -> Callable[[Value], bool]:
    return lambda value: value in cut or value.is_constant


def _is_given(leaf: Value, cut: Iterable[Value]) -> bool:
    return leaf in cut or leaf.is_constant or isinstance(leaf.type, ScalarType)
