"""A model that chooses by the values of tensors, as one graph that computes every side.

`if x.max() > 1: x = x / x.max()` is x / x.max() where that holds and x elsewhere. The model is
traced once for each way through its branches: what one way asks first, all others that begin as it
does ask too, so that two ways differ by the answer from which on they part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import sympy

from attngraph.checks.bisect import difference
from attngraph.checks.joining import UnlikeError, both, join, simplify
from attngraph.errors import CaptureError, IRError
from attngraph.export.parity.reference import Reference
from attngraph.frontend.capture import Captured
from attngraph.frontend.model import Model, trace
from attngraph.frontend.rewording.branches import forced_sides
from attngraph.frontend.watching.asked import Place
from attngraph.frontend.watching.locations import quote
from attngraph.ir import Dim, interpret
from attngraph.ir.conditions import condition_rewritten
from attngraph.ir.dims import rewritten, same

_MOST = 9
"""Traces of a model on its ways: 3 conditions that are asked on every way have 8."""
_ROUNDING = 2.0**-8
"""What a trace may differ by from the model, of the outputs' scale: it may be of halves."""


def both_sides(model: Model, *, elsewhere: bool, forces: bool = True) -> Captured:
    """The model on all of its ways. `elsewhere` is as in `trace`; the model is run on each of them
    if that `forces` it to.

    Raises CaptureError where they can't be one graph.
    """
    captured = _Ways(model, elsewhere, forces).joined(())
    asked = tuple(replace(each, value=None) for each in captured.asked)
    return replace(captured, asked=asked)


def refused(place: Place, why: str) -> CaptureError:
    """What is told of a branch that no graph can follow."""
    return CaptureError(
        f"Python decides by the values of a tensor at {quote(*place)}, which are known only at run "
        f"time, and {why}. Use torch.where, or leave the branch out for the export."
    )


@dataclass
class _Ways:
    model: Model
    elsewhere: bool
    forces: bool
    traced: int = 0
    parting: Place | None = None

    def joined(self, way: tuple[bool, ...]) -> Captured:
        """The model on every way that begins with these answers."""
        captured = self._traced(way)
        graph, asked = captured.graph, captured.asked
        names, results = graph.output_names, len(graph.outputs)
        conditions = [each.value for each in asked if each.value is not None]
        graph.set_outputs(
            [*graph.outputs, *conditions],
            [*names, *(f"asked_{at}" for at in range(len(conditions)))],
        )
        simplify(graph)
        conditions = [*graph.outputs[results:]]
        said = [each.said for each in asked]
        first = [conditions.index(condition) for condition in conditions]
        for at in range(len(way), len(said)):
            if said[at] != said[first[at]]:  # the same was asked before, and was otherwise
                return self.joined((*said[:at], said[first[at]]))
        parts = [at for at in range(len(way), len(said)) if first[at] == at]
        if self.traced + len(parts) > _MOST:
            raise refused(asked[-1].place, "there are too many ways through the model")
        for at in reversed(parts):
            place, answer = asked[at].place, not said[at]
            self.parting = place
            other = self.joined((*said[:at], answer))
            if not returns_alike(captured, other):
                raise refused(place, "its sides return different things")
            try:
                captured, other = _of_one_size(captured, other)
                join(graph, other.graph, results + at, when=answer, results=results)
            except UnlikeError as unlike:
                why = str(unlike) or "what its sides compute is of different shapes or types"
                raise refused(place, why) from None
            captured = _with(captured, other)
        graph.set_outputs(graph.outputs[:results], names)
        return captured

    def _traced(self, way: tuple[bool, ...]) -> Captured:
        self.traced += 1
        try:
            # With None a loop over the experts that were hit is refused, which is to be checked.
            sides = dict[Place, bool]() if self.forces else None
            captured = trace(self.model, sides, way=way, elsewhere=self.elsewhere)
        except CaptureError as error:
            if self.parting is None:
                raise
            raise refused(
                self.parting, f"one of its sides fails: {str(error).rstrip('.')}"
            ) from error
        asked = captured.asked
        steps = [each for each in asked if each.value is None]
        if steps:
            raise refused(steps[0].place, "it is asked in each step of a loop")
        if tuple(each.said for each in asked[: len(way)]) != way:
            raise refused(asked[-1].place, "what is asked there changes from one trace to another")
        compared = self.forces and _agrees_when_forced(self.model, captured)
        return replace(captured, asked=tuple(replace(e, compared=compared) for e in asked))


def _agrees_when_forced(model: Model, captured: Captured) -> bool:
    """Whether a trace is what the model computes of the sample if it has to take the same sides.

    Not if it can't be made to, as by numbers that it needs as Python's. Raises CaptureError where
    it computes something else.
    """
    answers: dict[Place, list[bool]] = {}
    for each in captured.asked:
        answers.setdefault(each.place, []).append(each.said)
    assert model.module is not None
    numbers = captured.signature.numbers
    reference = Reference(model.module, precision="fp32", numbers=numbers)
    try:
        with forced_sides(answers) as left:
            found = reference.eager(*captured.sample)
    except Exception:  # of inputs that aren't meant for this side
        return False
    try:
        traced = interpret(captured.graph, captured.args)
    except (IRError, RuntimeError, IndexError):  # of sizes that aren't, either
        return False
    if any(left.values()) or len(traced) != len(found):
        return False
    pairs = zip(traced, found, strict=True)
    if any(difference(ours, theirs) > _ROUNDING for ours, theirs in pairs):
        raise refused(
            captured.asked[0].place, "torch.export traces one of its sides as something else"
        )
    return True


def returns_alike(ours: Captured, theirs: Captured) -> bool:
    """Whether two traces return the same names, nested alike, and the same constants."""
    first, second = ours.signature, theirs.signature
    return (
        ours.output_names == theirs.output_names
        and first.out_spec == second.out_spec
        and repr(first.constants) == repr(second.constants)
        and (first.numbers, first.complexes) == (second.numbers, second.complexes)
    )


def _of_one_size(ours: Captured, theirs: Captured) -> tuple[Captured, Captured]:
    """Both with the dims that only one of them ties, as by adding a mask that the other leaves out.

    Raises UnlikeError where one has a number for a dim of the other.
    """
    known = dict[str, Dim](), dict[str, Dim]()
    for first, second in zip(ours.graph.inputs, theirs.graph.inputs, strict=True):
        if len(first.shape) != len(second.shape):
            raise UnlikeError
        for size, other in zip(first.shape, second.shape, strict=True):
            sides = rewritten(size, known[0]), rewritten(other, known[1])
            if same(*sides):
                continue
            if not all(isinstance(side, sympy.Symbol) for side in sides):
                raise UnlikeError("one of its sides fixes a size that the other leaves open")
            # The one that has another input's name is the tied one.
            tied = 0 if str(sides[0]) in theirs.graph.dims else 1
            old, new = sides[1 - tied], sides[tied]
            named = known[1 - tied]
            named.update({name: rewritten(dim, {str(old): new}) for name, dim in named.items()})
            named[str(old)] = new
    return _renamed(ours, known[0]), _renamed(theirs, known[1])


def _renamed(captured: Captured, known: Mapping[str, Dim]) -> Captured:
    """The graph with other dims in the place of some: of the sizes that both may have."""
    graph = captured.graph
    for old, new in known.items():
        info = graph.dims[old]
        graph.dims[str(new)] = both(graph.dims.get(str(new), info), info)
    graph.define_dims(known)
    return replace(
        captured,
        dynamic={place: str(known.get(name, name)) for place, name in captured.dynamic.items()},
        apart=tuple((str(known.get(a, a)), str(known.get(b, b))) for a, b in captured.apart),
        suspects=tuple(
            replace(each, condition=condition_rewritten(each.condition, known))
            for each in captured.suspects
        ),
        demanded={condition_rewritten(c, known): at for c, at in captured.demanded.items()},
    )


def _with(ours: Captured, theirs: Captured) -> Captured:
    """What holds for both, and what is to be checked of either."""
    return replace(
        ours,
        notes=tuple(dict.fromkeys((*ours.notes, *theirs.notes))),
        apart=tuple(dict.fromkeys((*ours.apart, *theirs.apart))),
        suspects=tuple(dict.fromkeys((*ours.suspects, *theirs.suspects))),
        demanded={**theirs.demanded, **ours.demanded},
        branches={**theirs.branches, **ours.branches},
        fixed=tuple(dict.fromkeys((*ours.fixed, *theirs.fixed))),
        refusal=ours.refusal or theirs.refusal,
        opened=ours.opened or theirs.opened,
        jumps=ours.jumps | theirs.jumps,
        hits=ours.hits or theirs.hits,
        asked=(*ours.asked, *(each for each in theirs.asked if each not in ours.asked)),
    )
