"""Why a loop over time stays one: the term of its step that no operator has.

A step is looked at as `attn.linear_attention` or `attn.generalized_delta_rule` would have it, S' =
A S + k ⊗ v and z = scale · qᵀ S:
what isn't affine is found in the graph; A and what is added, on drawn numbers. Only the sentence
depends on them, and no rewrite does.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch

from attngraph.analysis.recurrence.corrections import other_factor
from attngraph.analysis.recurrence.outer_terms import Runs
from attngraph.analysis.recurrence.steps import known_data
from attngraph.analysis.recurrence.uniform import is_affine
from attngraph.analysis.rows.batching import rule_of
from attngraph.analysis.values.intervals import Intervals
from attngraph.analysis.values.running import is_near
from attngraph.ir import Graph, Node, Value
from attngraph.ir.ops import attribute
from attngraph.ir.slices import backward_slice
from attngraph.ir.traits import (
    ARITHMETIC,
    CHOICE,
    COPY,
    JOIN,
    LAYOUT,
    LINEAR,
    MEAN,
    MULTIPLICATIVE,
    TRIANGLE,
)

_KERNELS = (torch.float32, torch.float16)
MOST_DECAYS = 16
"""Of a state without keys, up to which the operator is faster than a step: it takes 0.2 µs for each
of a token, on one thread of a CPU, and two nodes of a step take 3 µs."""

_LARGE = 1 << 22  # elements of a state that is run

_OTHER = "its next state depends on another state of the loop"
_CIRCLE = "its next state depends on another state of the loop, and that one on it"
_WHOLE = "another state of the loop is made of all of its state, and not of what a query reads"
_TURNED = (
    "its state is made of complex numbers, which a step multiplies by others, and the operator's "
    "decays are real"
)
_MOVED = "it keeps earlier inputs, and isn't read as the state of a convolution"
_MANY = (
    f"its state decays by more than {MOST_DECAYS} numbers in a step, from which on the operator "
    "takes longer than a loop does"
)
_CHANNELS = "its state is one number for each channel, which no product of a key and a value is"
_OWN_DECAYS = "each number of its state decays by its own factor, not each head or key feature"
_OF_VALUES = "its decay is that of each value feature, not of each head or key feature"
_MIXED = "the numbers of its state are mixed by a matrix"
_KEYS = "its state is corrected by what more than one key reads"
_ADDED = "what is added to its state isn't the product of one key and one value"
_READ = "its state is read otherwise than by one query"
_SIGNED = "its decay isn't known to be at least 0, and the operator takes the logarithm of it"
_UNREAD = "its terms weren't all found among the values of a step, for all steps at once"


@dataclass(frozen=True)
class Kept:
    """Why a state stays in its loop, and the node that says so. `is_matrix`: the state has keys
    and values, as that of linear attention has."""

    why: str
    node: Node
    is_matrix: bool


def why_kept(loop: Node) -> Iterator[Kept]:
    """One for each reason that a loop's states have, last that another state stays."""
    body: Graph = attribute(loop, "body")
    carried = attribute(loop, "carried")
    states = body.inputs[:carried]
    items = body.inputs[carried : carried + attribute(loop, "scanned")]
    operands = dict(zip(body.inputs, loop.inputs, strict=True))
    found: dict[tuple[str, Node], Kept] = {}
    nexts = dict(zip(states, body.outputs, strict=False))
    for state, after in nexts.items():
        if after is not state and after.producer is not None and state.dtype.is_floating_point:
            kept = _State(body, state, nexts, items, operands).kept()
            found.setdefault((kept.why, kept.node), kept)
    yield from sorted(found.values(), key=lambda kept: kept.why in (_OTHER, _CIRCLE))


class _State:
    def __init__(
        self,
        body: Graph,
        state: Value,
        nexts: Mapping[Value, Value],
        items: Collection[Value],
        operands: Mapping[Value, Value | None],
    ) -> None:
        self.body, self.state, self.items, self.operands = body, state, items, operands
        after = nexts[state]
        self.nexts = nexts
        self.rest = [value for value in body.outputs if value is not after]
        assert after.producer is not None
        node = after.producer
        if node.op == "aten.where.self" and node.inputs[2] is state:
            after = node.inputs[1] or after
        self.after, self.others = after, [each for each in nexts if each is not state]
        self.node = after.producer or node  # where an input of the step is kept, what chooses it
        self.is_matrix = len(state.shape) >= 3 and tuple(state.shape[-2:]) != (1, 1)

    def kept(self) -> Kept:
        why, node = self._why()
        return Kept(why, node, self.is_matrix and why is not _MOVED)

    def _why(self) -> tuple[str, Node]:
        leaves, nodes = backward_slice([self.after], lambda each: each is self.state)
        reached = {self.state}
        for node in nodes:
            if not any(value in reached for value in node.inputs):
                continue
            is_chosen = node.op == "aten.where.self" and node.inputs[0] not in reached
            is_linear = node.op in LINEAR and reached.isdisjoint(node.inputs[1:])
            is_linear = is_linear or is_chosen or node.op in MEAN | TRIANGLE
            affine = is_linear or is_affine(node, reached)
            reached.update(node.outputs)
            if not affine:
                name = _name_of(node)
                return f"its next state is no linear function of the state, for {name}", node
        behind = [node for node in nodes if any(value in reached for value in node.inputs)]
        if all(node.op in LAYOUT | JOIN for node in behind):
            return _MOVED, self.node
        if any(leaf in self.others for leaf in leaves):
            if (turned := self._turned(leaves)) is not None:
                return _TURNED, turned
            first = [n for n in nodes if any(v in self.others for v in n.inputs)]
            if self._is_needed_by(leaves):
                return _CIRCLE, first[0]
            if self.is_matrix and (why := self._without_kernel()):
                return why, behind[0]
            has_terms = len(self.state.shape) > 3
            if not has_terms and (wide := _widely_decayed(behind, reached)) is not None:
                return _MANY, wide
            why, node = self._of_terms(behind) if has_terms else (_UNREAD, self.node)
            return (_OTHER, first[0]) if why is _UNREAD else (why, node)
        if not self.is_matrix:
            return _CHANNELS, self.node
        if why := self._without_kernel():
            return why, behind[0]
        return self._of_terms(behind)

    def _without_kernel(self) -> str:
        name = str(self.state.dtype).removeprefix("torch.")
        is_known = self.state.dtype in _KERNELS
        return "" if is_known else f"the operator has no kernel for a state in {name}"

    def _is_needed_by(self, leaves: Collection[Value]) -> bool:
        """Whether a state among the leaves depends on this one, after any number of steps."""
        found = [leaf for leaf in leaves if leaf in self.others]
        for state in found:
            own, _ = backward_slice([self.nexts[state]], self.nexts.__contains__)
            found += [leaf for leaf in own if leaf in self.nexts and leaf not in found]
        return self.state in found

    def _turned(self, leaves: Collection[Value]) -> Node | None:
        """What makes the next state, or that of another one which reads this state too, if the two
        are the parts of complex numbers: of i times these, a step makes i times what it makes.
        """
        read = [each for each in self.others if each in leaves]
        node = self.nexts[read[0]].producer
        if len(read) != 1 or node is None or read[0].shape != self.state.shape:
            return None
        pair = [self.state, read[0]]
        runs = Runs(self.body, self.state, [self.nexts[each] for each in pair], [], self._data)
        drawn = runs.known(0)
        if drawn is None or torch.Size(runs.shape).numel() > _LARGE:
            return None

        given = {leaf: drawn[leaf] for leaf in runs.leaves if leaf is not self.state}

        def after(*parts: torch.Tensor) -> list[torch.Tensor] | None:
            own = given | dict(zip(pair, parts, strict=True))
            made = runs.through([*runs.before, *runs.behind], own)
            return None if made is None else [made[value] for value in runs.results]

        random = torch.Generator().manual_seed(1)
        a, b = torch.randn((2, *runs.shape), generator=random, dtype=torch.float64)
        zero, one, turned = after(a * 0, b * 0), after(a, b), after(-b, a)
        if zero is None or one is None or turned is None:
            return None
        x, y = (after - before for before, after in zip(zero, one, strict=True))
        u, v = (after - before for before, after in zip(zero, turned, strict=True))
        both = torch.stack([u, v]), torch.stack([-y, x])
        first = self.node if pair == [each for each in self.nexts if each in pair] else node
        return first if is_near(*both) else None

    def _of_terms(self, behind: list[Node]) -> tuple[str, Node]:
        runs = Runs(self.body, self.state, [self.after], [], self._data)
        known = runs.known(0)
        if known is None or torch.Size(runs.shape).numel() > _LARGE:
            return _UNREAD, self.node
        random = torch.Generator().manual_seed(0)
        keys, features = runs.shape[-2:]

        def run(state: torch.Tensor) -> torch.Tensor | None:
            found = runs.after(known, state.reshape(runs.shape))
            is_whole = found is not None and found[0].numel() == state.numel()
            return found[0].reshape(state.shape) if found is not None and is_whole else None

        count = 2 + max(-(-keys // features), -(-features // keys))
        states = torch.randn((count, *runs.shape), generator=random, dtype=torch.float64)
        states = states.reshape(count, -1, keys, features)
        added = run(states[0] * 0)
        results = [run(each) for each in states]
        if added is None or not bool(added.isfinite().all()):
            return _UNREAD, self.node
        moved = [each - added for each in results if each is not None]
        if len(moved) < count or not all(bool(each.isfinite().all()) for each in moved):
            return _UNREAD, self.node
        return self._named(states, moved, added, behind)

    def _named(
        self,
        states: torch.Tensor,
        moved: list[torch.Tensor],
        added: torch.Tensor,
        behind: list[Node],
    ) -> tuple[str, Node]:
        """By what becomes of states (N, B·H, X, Y), less what is added (B·H, X, Y)."""
        keys_first = self._reads_first_axis()
        decay = moved[0] / states[0]
        if is_near(decay * states[1], moved[1]):
            of_rows = is_near(decay[..., :1].expand_as(decay), decay)
            of_columns = is_near(decay[..., :1, :].expand_as(decay), decay)
            if not of_rows and not of_columns:
                return _OWN_DECAYS, behind[0]
            if (of_columns if keys_first else of_rows) and not (of_rows and of_columns):
                return _OF_VALUES, behind[0]
        else:
            own = _decay_of_matrix(states, moved, keys_first)
            if isinstance(own, str) and not (own is _KEYS and _has_several(added)):
                return own, behind[0]
            if not isinstance(own, str):
                decay = (own[..., None] if keys_first else own[..., None, :]).expand_as(decay)
        if _has_several(added):  # two delta rules, or more
            return _ADDED, self.node
        if (node := self._read_whole()) is not None:
            return _WHOLE, node
        reads = self._reads()
        if len(reads) != 1:
            return _READ, reads[-1] if reads else self.node
        apart = self._apart()
        is_signed = apart is None and self._may_be_negative(decay)
        return apart or ((_SIGNED if is_signed else _UNREAD), behind[0] if is_signed else self.node)

    def _may_be_negative(self, decay: torch.Tensor) -> bool:
        """Whether a value of the step is the decay (B·H, X, Y), and may be below 0."""
        runs = Runs(self.body, self.state, [self.after], [], self._data)
        for value, x in (runs.known(0) or {}).items():
            if not isinstance(x, torch.Tensor) or not x.is_floating_point():
                continue
            shared = (decay[..., :1], decay[..., :1, :], decay[..., :1, :1])
            own = [each for each in shared if each.numel() == x.numel()]
            if any(is_near(x.reshape(each.shape), each) for each in own):
                return self._least(value) < 0
        return False

    def _least(self, value: Value) -> float:
        while (node := value.producer) is not None and node.op in LAYOUT and node.inputs[0]:
            value = node.inputs[0]
        return Intervals().of(self.operands.get(value) or value)[0]

    def _apart(self) -> tuple[str, Node] | None:
        """The first op of a step before its state that isn't known to compute step by step."""
        _, nodes = backward_slice(self.body.outputs, lambda each: each is self.state)
        varying, reached = {*self.items}, {self.state}
        for node in nodes:
            if any(value in reached for value in node.inputs):
                reached.update(node.outputs)
            elif any(value in varying for value in node.inputs):
                varying.update(node.outputs)
                if rule_of(node) is None:
                    return f"{_name_of(node)} of a step isn't known for all steps at once", node
        return None

    def _reads_first_axis(self) -> bool:
        """Whether what reads the state leaves the last of its axes: (B, H, X, Y) to (B, H, Y)."""
        last = self.state.shape[-1]
        sizes = [value.shape for node in self._reads() for value in node.outputs]
        shapes = [[size for size in shape if size != 1] for shape in sizes]
        return not shapes or not shapes[0] or shapes[0][-1] == last

    def _read_whole(self) -> Node | None:
        """What makes another state's next value of as many numbers that this state reaches."""
        nexts = [self.nexts[other] for other in self.others]
        _, nodes = backward_slice(nexts, lambda each: each is self.state)
        large, elements = {self.state}, _elements(self.state)
        for node in nodes:
            if any(value in large for value in node.inputs):
                large.update(each for each in node.outputs if _elements(each) >= elements)
        return next((each.producer for each in nexts if each in large), None)

    def _reads(self) -> list[Node]:
        """The first nodes that sum over the state for what a step gives."""
        reached = {self.state}
        _, nodes = backward_slice(self.rest, lambda each: each is self.state)
        _, own = backward_slice([self.after], lambda each: each is self.state)
        found = []
        elements = _elements(self.state)
        for node in nodes:
            if any(value in reached for value in node.inputs):
                if any(_elements(value) >= elements for value in node.outputs):
                    reached.update(node.outputs)
                elif node not in own:
                    found.append(node)
        return found

    def _data(self, value: Value) -> torch.Tensor | None:
        return known_data(self.operands.get(value) or value)


def _decay_of_matrix(
    states: torch.Tensor, moved: list[torch.Tensor], first: bool
) -> torch.Tensor | str:
    """What numbers (B·H, X) decay by, beside a correction by one key, or why there are none: of a
    step that sums over the axis of keys, the first of each state (X, Y) if `first`.
    """
    s, m = (
        torch.cat([each if first else each.mT for each in given], -1)
        for given in (list(states), moved)
    )
    slope = torch.linalg.lstsq(s.mT, m.mT).solution.mT
    if not is_near(slope @ s, m):
        return _MIXED
    if slope.shape[0] > 1 and is_near(slope[:1].expand_as(slope), slope):
        return _MIXED
    own: torch.Tensor = slope.diagonal(dim1=-2, dim2=-1)
    if slope.shape[-1] < 3:  # what stands beside the diagonal is of any key
        return own
    beside = slope - torch.diag_embed(own)
    a = beside[..., 0, :].clone()
    a[..., 0] = beside[..., 1, 0] * beside[..., 0, 2] / beside[..., 1, 2]
    b = other_factor(beside, a)
    return _KEYS if b is None else own - a * b


def _widely_decayed(behind: list[Node], reached: Collection[Value]) -> Node | None:
    """What multiplies a state (B, …) by too many numbers, where each of its numbers has steps of
    its own: `behind` are the nodes that it reaches."""
    if any(node.op not in ARITHMETIC | COPY | CHOICE for node in behind):
        return None
    for node in behind:
        for value in node.operands if node.op in MULTIPLICATIVE else ():
            rows = node.output.shape[: 1 + len(value.shape) - len(node.output.shape)]
            sizes = [size for size in value.shape[len(rows) :] if isinstance(size, int)]
            if value not in reached and math.prod(sizes) > MOST_DECAYS:
                return node
    return None


def _name_of(node: Node) -> str:
    """What PyTorch calls the op."""
    return node.op.partition(".")[2].partition(".")[0].strip("_")


def _elements(value: Value) -> int:
    """Of one row."""
    return int(torch.Size([size for size in value.shape if isinstance(size, int)]).numel())


def _has_several(added: torch.Tensor) -> bool:
    """Whether matrices (B·H, X, Y) are no product of a key and a value, but a sum of these."""
    values = torch.linalg.svdvals(added)
    return values.shape[-1] > 1 and bool((values[:, 1] > 1e-8 * values[:, 0]).any())
