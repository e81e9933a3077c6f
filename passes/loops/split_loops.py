"""split-loops: states that are a convolution's or linear attention's leave the loop they are in."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attngraph.analysis.recurrence.outer_chain import read_outer_steps
from attngraph.analysis.recurrence.outer_terms import OuterStep, StateStep
from attngraph.analysis.recurrence.registers import read_register
from attngraph.analysis.recurrence.steps import known_data
from attngraph.analysis.recurrence.terms import fused
from attngraph.analysis.values.intervals import Intervals
from attngraph.analysis.walks import stripped
from attngraph.errors import IRError
from attngraph.ir import Builder, Dim, Graph, Node, Remark, Value, clone
from attngraph.ir.dead import eliminate_dead_code
from attngraph.ir.dims import product, same
from attngraph.ir.ops import attribute
from attngraph.ir.slices import backward_slice
from attngraph.ir.traits import CHOICE, EXPAND, RESHAPE
from attngraph.passes.canonical.normal_form import FORMS
from attngraph.passes.loops.batched_steps import Plan
from attngraph.passes.loops.decayed_sums import Summed, read_decayed_sum
from attngraph.passes.loops.fission import Fission, divide
from attngraph.passes.loops.narrowing import Narrowing
from attngraph.passes.loops.outer_steps import Outer, Parts
from attngraph.passes.loops.scan_parts import ScanParts, read_alone
from attngraph.passes.loops.shared_heads import spread_heads
from attngraph.passes.loops.shown_steps import Convolution, Places
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.manager import GraphPass
from attngraph.passes.rewriting.rewriter import Rewriter
from attngraph.passes.rewriting.trials import LOGITS

_REASSOCIATES = "A loop's convolution or linear attention is one operator over all of its steps."
_KERNELS = (torch.float32, torch.float16)
_SPREAD = RESHAPE | EXPAND


class SplitLoops(GraphPass, name="split-loops", exact=False):
    """Takes states out of each `attn.scan`, one after the other, by what a step does with them.

    A state that keeps the last inputs of a convolution becomes `attn.causal_conv` over all steps
    (registers.py), one of outer products `attn.linear_attention` (outer_step.py), over as many
    tokens as a step has updates one after the other (outer_chain.py), and one that is read by
    another key than it is written by `attn.generalized_delta_rule`, as long as what these read is
    computed without another state that is left. A loop is divided (fission.py) where such states
    read others that don't read them, as those of mLSTM read their running maximum: these have a
    loop of their own, in front. Beside linear attention, its normalisers leave too
    (decayed_sums.py). The rest of a step is batched, or where a state stays, a smaller loop. A step
    that leaves the states of a row as they are, as `where(shown, new, old)` does, counts as read if
    its results there are hidden too, or those of linear attention read the state that stayed: rows
    are brought together without it, and in linear attention it has decay 1 and update 0. What can't
    be batched stays in the loop, and its states with it. Without `recurrences` linear attention
    stays; with `exact_only` nothing is done.
    """

    exact_only: bool = False
    recurrences: bool = True

    def run(self, graph: Graph) -> list[Remark]:
        checked = Checked(graph, self.name, LOGITS, depth=None, exact_only=self.exact_only)
        places: dict[Value, Places] = {}
        read_alone(graph)
        if checked.allows(_REASSOCIATES):
            for node in _loops(graph):
                done = _Loop(graph, node, places).split(checked, outer=self.recurrences)
                if not done and self.recurrences:
                    _Loop(graph, node, places).split(checked, outer=False)
            whole = set[Node]()
            while self.recurrences and (left := [n for n in _loops(graph) if n not in whole]):
                whole.update(n for n in left if not _divide(graph, n, places, checked))
            for node in _loops(graph) if self.recurrences else ():
                loop = _Loop(graph, node, places)
                if spread_heads(loop.body, loop.states):
                    loop.split(checked, outer=True)
            Rewriter(graph, FORMS).run()  # operators over all steps meet in other forms than steps'
        return checked.remarks


def _divide(graph: Graph, node: Node, places: dict[Value, Places], checked: Checked) -> bool:
    """Takes states out of a loop behind those that they read, which stay in a loop of their own."""

    def taken(parts: Fission) -> set[int]:
        loop = _Loop(graph, parts.second, places, parts)
        is_read = loop.take(outer=True) and loop.pairs
        places.clear()  # nothing is left of an attempt
        states = zip(parts.late, loop.initial, strict=True) if is_read else ()
        return {at for at, state in states if state not in loop.states}

    def made(parts: Fission) -> bool:
        loop = _Loop(graph, parts.second, places, parts)
        return loop.take(outer=True) and loop.replace(checked)

    return divide(graph, node, taken, made)


class _Loop(ScanParts):
    """A loop that is taken apart. `body` is a step of its own, to which nodes are added.

    `stacked` also gets other values of a step; `items` are those that the loop may be given.
    """

    def __init__(
        self,
        graph: Graph,
        node: Node,
        places: dict[Value, Places],
        part_of: Fission | None = None,
    ) -> None:
        super().__init__(graph, node, clone(attribute(node, "body")))
        self.places, self.part_of = places, part_of
        self.states, self.items = list(self.initial), list(self.stacked)
        self.most = self.elements([*self.stacked, *self.results])
        self.after = dict(zip(self.states, self.body.outputs, strict=False))
        self.last: dict[Value, Value] = {}
        self.remarks: list[Remark] = []
        self.pairs: list[tuple[Value, Value]] = []
        self.build = Builder(graph, node, node.loc)
        self.inner = Builder(self.body, None, node.loc)

    def split(self, checked: Checked, *, outer: bool) -> bool:
        """False where it isn't and without `outer` it might be."""
        taken = self.take(outer=outer)
        return self.replace(checked) or not taken

    def take(self, *, outer: bool) -> bool:
        """Whether states of outer products are taken out, and with them what is summed as they are;
        those of convolutions are too."""
        taken: list[Value] = []
        try:
            done = [state for state in list(self.states) if self._take_register(state)]
            if outer:
                wide = [state for state in self.states if 1 not in state.shape[-2:]]
                taken = [state for state in wide if self._take_outer(state)]
                if taken:  # with their normalisers
                    done += [state for state in list(self.states) if self._take_sum(state)]
                taken += [state for state in list(self.states) if self._take_outer(state)]
            self.pairs = self._rest() if done or taken else []
        except IRError:  # an op takes no operands of all steps
            self.pairs = []
        return bool(taken)

    def replace(self, checked: Checked) -> bool:
        """Puts what was taken out in the place of the loop; False where it isn't the same."""
        whole = self.node if self.part_of is None else self.part_of.loop
        leaves = whole.operands
        made = bool(self.pairs) and checked.replace(
            self.pairs, leaves=leaves, reassociates=_REASSOCIATES, at=whole
        )
        if not made:
            self.places.clear()  # which may be dead now
        eliminate_dead_code(self.graph)
        checked.remarks += self.remarks if made else []
        return made

    # What is taken out.

    def _take_register(self, state: Value) -> bool:
        shown, after = self._update(state)
        rest = self._others(state)
        found = read_register(state, after, rest)
        if found is None or not self._hides(rest, state, shown):
            return False
        x = self._batched(found.item)
        weight, bias = (None if v is None else self._batched(v) for v in (found.weight, found.bias))
        mask = None if shown is None else self._shown(shown, state)
        if x is None or weight is None or (found.bias is not None and bias is None):
            return False
        if shown is not None and mask is None:
            return False
        write = Convolution(self.build, found, self.initial[state], mask, self.steps)
        given, last = write.made(x, weight, bias)
        self._leave(state, {found.result: given}, last)
        return True

    def _take_outer(self, state: Value) -> bool:
        shown, after = self._update(state)
        rest = self._others(state)
        if self._reads_others(state, after):
            return False
        found = self._read_outer(state, after, rest, shown)
        if state.dtype not in _KERNELS and any(step.rule != "general" for step in found):
            return False
        if any(each.dtype != state.dtype for step in found for each in step.operands):
            return False
        parts = [made for step in found if (made := self._parts(step, state.shape[0])) is not None]
        if not found or len(parts) < len(found):
            return False
        mask = None if shown is None else self._shown(shown, state)
        if shown is not None and mask is None:
            return False
        bonus = None if found[0].bonus is None else self._batched(found[0].bonus)
        if found[0].bonus is not None and bonus is None:
            return False
        self._write_outer(state, found, parts, bonus, mask)
        return True

    def _take_sum(self, state: Value) -> bool:
        after = self.after[state]
        if state.dtype not in _KERNELS or self._reads_others(state, after):
            return False
        if self.elements([state]) > self.most:  # all steps would hold what one does now
            return False
        found = read_decayed_sum(self.inner, state, after, self._least)
        if found is None:
            return False
        added = self._in_all_steps(self.inner("aten.expand", found.added, size=list(state.shape)))
        decay = None if found.decay is None else self._in_all_steps(found.decay)
        if added is None or (decay is None and found.decay is not None):
            return False
        made = Summed.of(self.build, found, added, decay, self.initial[state])
        self._leave(state, {after: made.after, state: made.before}, made.last)
        return True

    def _parts(self, found: OuterStep, batch: Dim) -> Parts | None:
        """An update's operands for all steps; None where one can't be batched."""
        value, read, written = found.value, None, None
        if found.rate is not None:
            value = self._multiplied(found, [value, found.rate], batch)
        if found.reads:
            read, written = (
                self._multiplied(found, each, batch) for each in (found.reads, found.writes)
            )
            if found.turn != 1:
                written = self.inner("aten.mul.Scalar", written, other=found.turn)
        operands = found.query, found.key, value, found.decay, found.beta, read, written
        parts = [None if each is None else self._packed(each, batch) for each in operands]
        pairs = zip(operands, parts, strict=True)
        return None if any(a is not None and b is None for a, b in pairs) else parts

    def _read_outer(
        self, state: Value, after: Value, rest: Sequence[Value], shown: Value | None
    ) -> list[OuterStep]:
        """What a step does to a state, by one update or several; none if it isn't read. Results
        that read the next one, whether or not it stayed as it was, are those of an update by 0;
        others have to be hidden where it did.
        """
        known, narrow = self._known(state, after)
        following = self.after[state]

        def step(next: Value, shown: Value | None) -> StateStep:
            given = known, narrow, self._data, self._least
            return StateStep(self.body, state, next, rest, *given, shown)

        if state not in backward_slice(rest, lambda each: each is following)[0]:
            found = read_outer_steps(step(following, shown))
            if found or shown is None:
                return found
        if not self._hides(rest, state, shown):
            return []
        return read_outer_steps(step(after, None))

    def _write_outer(
        self,
        state: Value,
        found: Sequence[OuterStep],
        parts: Sequence[Parts],
        bonus: Value | None,
        mask: Places | None,
    ) -> None:
        initial = self.initial[state]
        write = Outer(self.build, found, self.steps, state)
        given, last, node = write.made(parts, initial, bonus, mask)
        self.remarks.append(fused(node, self.node.loc, len(found)))
        self._leave(state, given, last)

    def _leave(self, state: Value, given: dict[Value, Value], last: Value) -> None:
        self.stacked.update(given)
        self.items += given
        self.last[state] = last
        self.states.remove(state)

    # What a step is made of.

    def _update(self, state: Value) -> tuple[Value | None, Value]:
        """A state's next value, and where it is that: elsewhere the state stays as it is."""
        after = self.after[state]
        node = after.producer
        if node is None or node.op != "aten.where.self" or node.inputs[2] is not state:
            return None, after
        return node.source, node.input(1)

    def _others(self, state: Value) -> list[Value]:
        """What else a step gives: the next values of other states, and its results."""
        others = [self.after[other] for other in self.states if other is not state]
        return [*others, *self.results]

    def _hides(self, rest: Sequence[Value], state: Value, shown: Value | None) -> bool:
        """Whether what reads the state isn't given where it stays as it is."""
        return shown is None or all(self._is_hidden(value, state, shown) for value in rest)

    def _is_hidden(self, value: Value, state: Value, shown: Value) -> bool:
        if not _reaches(state, value):
            return True
        node = value.producer
        if node is None or node.op not in CHOICE or "where" not in node.op:
            return False
        predicate, *branches = node.inputs
        other = branches[1] if len(branches) > 1 else None
        is_same = predicate is not None and stripped(predicate, _SPREAD) is stripped(shown, _SPREAD)
        return is_same and (other is None or not _reaches(state, other))

    def _reads_others(self, state: Value, after: Value) -> bool:
        leaves, _ = backward_slice([after], self.stacked.__contains__)
        return any(leaf in self.states and leaf is not state for leaf in leaves)

    def _known(self, state: Value, after: Value) -> tuple[list[Value], dict[Value, Value]]:
        """The values of a step that no state reaches, and those that are one along some axis of the
        state's, without it."""
        reached = set(self.states)
        known: list[Value] = [*self.stacked]
        for node in self.body:
            if any(value in reached for value in node.inputs):
                reached.update(value for value in node.outputs if value not in self.stacked)
            else:
                known += node.outputs
        narrowing = Narrowing(self.inner, self._data)
        narrow: dict[Value, Value] = {}
        rank = len(state.shape)
        if rank < 3:
            return list(dict.fromkeys(known)), narrow
        own = [state.shape, state.shape[:-1], (*state.shape[:-2], state.shape[-1])]
        for value in list(dict.fromkeys(known)):
            if any(list(value.shape) == list(shape) for shape in own):
                for made in self._narrowed(narrowing, value, rank):
                    narrow[made] = value
        return [*dict.fromkeys(known), *narrow], narrow

    def _narrowed(self, narrowing: Narrowing, value: Value, rank: int) -> list[Value]:
        found: list[Value] = []
        for axis in range(rank - 2, len(value.shape)):
            for each in [value, *found]:
                made = narrowing.of(each, axis)
                if made is not None and made is not each:
                    found.append(made)
        return found

    def _multiplied(self, found: OuterStep, factors: Sequence[Value], batch: Dim) -> Value:
        """The product of values (B, H, D), of which all but the first may be (B, H, 1)."""
        rows = [batch, found.heads]
        made = None
        for each in factors:
            width = product(each.shape[1:]) // found.heads
            shaped = self.inner("aten.reshape", each, shape=[*rows, width])
            made = shaped if made is None else self.inner("aten.mul.Tensor", made, shaped)
        assert made is not None
        return made

    # What it becomes.

    def _batched(self, value: Value) -> Value | None:
        """A value of a step for all steps (T, …), or as it is where all read the same."""
        if value in self.stacked:
            return self.stacked[value]
        leaves, nodes = backward_slice([value], self.stacked.__contains__)
        if leaves and all(map(self.is_outside, leaves)):
            fixed = Plan(value, tuple(leaves), tuple((node, node.op, node.attrs) for node in nodes))
            return fixed.make(self.build, {}, self.outside)
        made = self.planned(value, set(self.items))
        return None if made is None else made.make(self.build, self.stacked, self.outside)

    def _in_all_steps(self, value: Value) -> Value | None:
        """As `_batched`, (T, …) where all steps read the same too."""
        made = self._batched(value)
        leaves, _ = backward_slice([value], self.stacked.__contains__)
        if made is None or not all(map(self.is_outside, leaves)):
            return made
        made = self.build("aten.reshape", made, shape=[1, *value.shape])
        return self.build("aten.expand", made, size=[self.steps, *value.shape])

    def _packed(self, value: Value, batch: Dim) -> Value | None:
        """(B, T, H·D) of what has its elements in the order (B, H, D)."""
        made = self._batched(value)
        if made is None or not same(made.shape[0], self.steps):
            return None
        shaped = self.build("aten.reshape", made, shape=[self.steps, batch, -1])
        return self.build("aten.permute", shaped, dims=[1, 0, 2])

    def _shown(self, shown: Value, state: Value) -> Places | None:
        """Which steps of each row are; the same nodes for all loops that are told so alike."""
        if [size for size in shown.shape if size != 1] not in ([state.shape[0]], []):
            return None
        if shown.shape and not same(shown.shape[0], state.shape[0]):
            return None
        item = self.stacked.get(stripped(shown, _SPREAD))
        if item is None or item not in self.places:
            made = self._batched(shown)
            if made is None or not same(made.shape[0], self.steps):
                return None
            shaped = self.build("aten.reshape", made, shape=[self.steps, state.shape[0]])
            found = Places.of(self.build, self.build("aten.permute", shaped, dims=[1, 0]))
            if item is None:
                return found
            self.places[item] = found
        return self.places[item]

    def _rest(self) -> list[tuple[Value, Value]]:
        """The loop's results, each with what takes its place."""
        outputs, pairs = list(self.node.outputs), list[tuple[Value, Value]]()
        if self.part_of is not None:
            outputs, pairs = self.part_of.remaining, self.part_of.made
        loop = self._loop() if self.states else {}
        for old, state in zip(outputs, self.body.inputs[: self.carried], strict=False):
            pairs.append((old, self.last[state] if state in self.last else loop[self.after[state]]))
        for old, root in zip(outputs[self.carried :], self.results, strict=True):
            made = loop[root] if self.states else self._batched(root)
            if made is None:
                return []
            pairs.append((old, made))
        return [(old, new) for old, new in pairs if old.uses or old in self.graph.outputs]

    def _loop(self) -> dict[Value, Value]:
        """A loop over the states that are left: the last ones, and all results stacked."""
        roots = [*(self.after[state] for state in self.states), *self.results]
        stacked = {item: self.stacked[item] for item in self.items}
        made = self.rebuilt(self.build, self.states, stacked, roots)
        return dict(zip(roots, made.outputs, strict=True))

    def _least(self, value: Value) -> float:
        """What no number of a step's value is below, wherever it is computed."""
        return Intervals(given={**self.fixed, **self.stacked}).of(value)[0]

    def _data(self, value: Value) -> torch.Tensor | None:
        return known_data(self.fixed.get(value, value))


def _loops(graph: Graph) -> list[Node]:
    return [node for node in graph if node.op == "attn.scan" and attribute(node, "scanned")]


def _reaches(state: Value, value: Value) -> bool:
    return state in backward_slice([value], lambda each: each is state)[0]
