"""Each closed form of a mask, broken on purpose, is told from the mask by evaluating both."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sympy

from attngraph.analysis.masks.predicates import (
    BATCH,
    KEY,
    QUERY,
    TRUE,
    And,
    Const,
    Linear,
    Or,
    Predicate,
    conjunction,
    disjunction,
    elements,
)
from attngraph.ir import format_graph, parse, verify
from attngraph.ir.dims import symbol
from attngraph.passes.attention import fold_masks
from attngraph.passes.attention.fold_masks import FoldMasks

SOURCE, TARGET, PAST = map(symbol, ("source", "target", "past"))
FIXTURES = Path(__file__).parent / "fold-masks"
FORMS = (
    "causal-cross",
    "causal-after-a-past",
    "offset-stays",
    "window",
    "window-after-a-past",
    "chunks-and-causal",
    "chunks-after-a-past",
    "prefix",
    "prefix-of-lengths",
    "lengths",
    "segments",
    "segments-of-positions",
    "packed-by-positions",
    "caller-positions",
)
MUTATIONS: dict[str, Callable[[Linear], Predicate]] = {
    "one more": lambda leaf: Linear(leaf.expr - 1),
    "one less": lambda leaf: Linear(leaf.expr + 1),
    "from the start": lambda leaf: Linear(leaf.expr.xreplace({PAST: sympy.Integer(0)})),
    "from the end": lambda leaf: Linear(_aligned_to_the_end(leaf.expr)),
    "dropped": lambda leaf: TRUE,
}


def _aligned_to_the_end(expr: Any) -> Any:
    """As if the last query met the last key, where their numbers differ."""
    return expr if elements(expr) else expr.subs(QUERY, QUERY + SOURCE - TARGET)


def _mutants(predicate: Predicate, mutate: Callable[[Linear], Predicate]) -> Iterator[Predicate]:
    """The predicate with one comparison mutated, for each of them."""
    if isinstance(predicate, Linear):
        yield mutate(predicate)
    elif isinstance(predicate, And | Or):
        joined = conjunction if isinstance(predicate, And) else disjunction
        for place, part in enumerate(predicate.operands):
            for mutant in _mutants(part, mutate):
                yield joined(*predicate.operands[:place], mutant, *predicate.operands[place + 1 :])


def _differ(one: Predicate, other: Predicate) -> bool:
    """Whether some index tells them apart; elements are some numbers of their index."""
    for sizes in ({PAST: 0, SOURCE: 6, TARGET: 4}, {PAST: 2, SOURCE: 4, TARGET: 6}):
        for query, key in itertools.product(range(7), range(9)):
            places = {BATCH: 0, QUERY: query, KEY: key, **sizes}
            if _holds(one, places) != _holds(other, places):
                return True
    return False


def _holds(predicate: Predicate, places: dict[Any, int]) -> bool:
    match predicate:
        case Const(value):
            return value
        case Linear(expr):
            known = {symbol: sympy.Integer(number) for symbol, number in places.items()}
            expr = expr.xreplace(known)
            numbers = {item: sympy.Integer((5 * sum(item.args) + 3) % 7) for item in elements(expr)}
            return bool(expr.xreplace(numbers) <= 0)
        case And(operands):
            return all(_holds(part, places) for part in operands)
        case Or(operands):
            return any(_holds(part, places) for part in operands)
        case _:
            return True


def _allowed(text: str, monkeypatch: pytest.MonkeyPatch) -> Predicate:
    """What the pass reads from the mask."""
    found = []
    describe = fold_masks.describe
    with monkeypatch.context() as patched:
        patched.setattr(
            fold_masks, "describe", lambda *args: found.append(args[0]) or describe(*args)
        )
        FoldMasks().run(parse(text))
    (predicate,) = found
    return predicate


@pytest.mark.parametrize("kind", MUTATIONS)
@pytest.mark.parametrize("name", FORMS)
def test_a_broken_closed_form_is_caught(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (FIXTURES / f"{name}.ir").read_text().partition("// ----")[0]
    original = _allowed(text, monkeypatch)
    decide = fold_masks._decide
    caught: list[bool] = []
    for mutant in _mutants(original, MUTATIONS[kind]):
        if not _differ(original, mutant):
            continue  # such as one chunk further, beside causal
        monkeypatch.setattr(
            fold_masks,
            "_decide",
            lambda *args, mutant=mutant: replace(decide(*args), allowed=mutant),
        )
        graph = parse(text)
        before = format_graph(graph)
        (remark,) = FoldMasks().run(graph)
        verify(graph)
        assert "kept as it is" in remark.reason, mutant
        caught.append("it gives other values" in remark.reason)
        assert format_graph(graph) == before
    assert caught or kind.startswith("from"), "nothing was tried"
    assert any(caught) or kind != "dropped", "nothing was evaluated"
