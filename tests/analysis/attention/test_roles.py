"""Which axis is which: from what the operands share, not from where they are stored."""

from __future__ import annotations

import pytest
import torch

from attngraph.analysis.attention.roles import Roles, Stage, assign, cheapest, stages
from attngraph.analysis.layout.axes import Atom, Axes, Operand
from attngraph.ir import Graph, TensorType, Value, parse
from attngraph.ir.dims import product, symbol

BATCH, SEQ, KEYS = symbol("batch"), symbol("seq"), symbol("keys")
SIZES = {"b": BATCH, "s": SEQ, "t": KEYS, "h": 2, "g": 3, "d": 4, "e": 5, "w": 7}


class Letters:
    """Atoms by letter: `b`, `s`, `t` of sizes known at run time, others static."""

    def __init__(self) -> None:
        self.atoms = {letter: Atom(size) for letter, size in SIZES.items()}

    def axes(self, text: str) -> Axes:
        """`"b s hd"`: one word per dim, major to minor."""
        return tuple(tuple(self.atoms[letter] for letter in word) for word in text.split())

    def flat(self, text: str) -> tuple[Atom, ...]:
        return tuple(self.atoms[letter] for letter in text)

    def stage(self, text: str) -> list[Stage]:
        axes = self.axes(text)
        shape = [product(atom.size for atom in dim) for dim in axes]
        value = Value("x", TensorType(torch.float32, tuple(shape)))
        return [Stage(Operand(value, axes), 1.0)]

    def name(self, atoms: tuple[Atom, ...]) -> str:
        known = {atom: letter for letter, atom in self.atoms.items()}
        return "".join(known[atom] for atom in atoms)


def _assign(query: str, key: str, value: str, scores: str, output: str) -> tuple[Letters, object]:
    letters = Letters()
    found = assign(
        letters.stage(query),
        letters.stage(key),
        letters.stage(value),
        letters.flat(scores),
        letters.flat("t"),
        letters.flat("d"),
        letters.flat(output),
    )
    return letters, found


PARTS = ("batch", "kv_heads", "groups", "queries", "keys", "features", "value_features")


@pytest.mark.parametrize(
    ("operands", "expected"),
    [
        # batch, key heads, groups, queries, keys, features, features of the values
        ("b s hd | b t hd | b t he | bhst | bshe", "b h  s t d e"),
        ("b h s d | b h t d | b h t e | bhst | bhse", "b h  s t d e"),
        ("s b hd | t b hd | t b he | bhst | sbhe", "b h  s t d e"),
        ("b h s d | b h t d | b h t e | bhts | bhse", "b h  s t d e"),  # scores in columns
        ("b s d | b t d | b t e | bst | bse", "b   s t d e"),  # one head
        ("b s hgd | b t hd | b t he | bhgst | bshge", "b h g s t d e"),  # grouped queries
        ("b h g s d | b h t d | b h t e | bhgst | bhgse", "b h g s t d e"),
        ("b s hd | b t d | b t e | bhst | bshe", "b  h s t d e"),  # one key head for all
        ("s hd | t hd | t he | hst | she", " h  s t d e"),  # no batch
        ("s d | t d | t e | st | se", "   s t d e"),
        ("b w hd | b t hd | b t he | bhwt | bwhe", "b h  w t d e"),  # queries known beforehand
        ("b w h d | b t d | b t e | bwht | bwhe", "b  h w t d e"),  # heads beside the features
        ("b h gw d | b h t d | b h t e | bhgwt | bhgwe", "b h  gw t d e"),  # a window of g × w
        ("g w d | t d | t e | gwt | gwe", "   gw t d e"),  # one memory for a batch of g
    ],
)
def test_parts_follow_from_what_is_shared(operands: str, expected: str) -> None:
    letters, roles = _assign(*(part.strip() for part in operands.split("|")))
    assert isinstance(roles, Roles), roles
    found = [letters.name(getattr(roles, part)) for part in PARTS]
    assert " ".join(found) == expected


def test_packed_shapes_are_those_of_the_op() -> None:
    letters, roles = _assign("b s hgd", "b t hd", "b t he", "bhgst", "bshge")
    assert isinstance(roles, Roles)
    assert roles.query == letters.axes("b s hgd")
    assert roles.key == letters.axes("b t hd")
    assert roles.value == letters.axes("b t he")
    assert roles.context == letters.axes("b s hge")
    assert roles.scores == letters.axes("b hg s t")


@pytest.mark.parametrize(
    ("term", "groups", "queries"), [("", "", "gw"), ("bgwt", "", "gw"), ("wt", "g", "w")]
)
def test_a_term_tells_groups_of_heads_from_queries(term: str, groups: str, queries: str) -> None:
    letters = Letters()
    query, key, value = map(letters.stage, ("b gw d", "b t d", "b t e"))
    flat = map(letters.flat, ("bgwt", "t", "d", "bgwe"))
    terms = [letters.flat(term)] if term else []
    roles = assign(query, key, value, *flat, terms)
    assert isinstance(roles, Roles), roles
    assert (letters.name(roles.groups), letters.name(roles.queries)) == (groups, queries)


@pytest.mark.parametrize(
    ("operands", "reason"),
    [
        ("b s d | b t d | b t e | bst | bs", "the output has axes"),
        ("b s d | b t d | b t e | bst | bsew", "the output has axes"),
        ("b s | b t d | b t e | bst | bse", "don't share the summed axis"),
        ("b s d | b t | b t e | bst | bse", "don't share the summed axis"),
        ("b s t d | b t d | b t e | bst | bse", "the queries depend on the key axis"),
        ("b s d | b t d | b e | bst | bse", "the queries depend on the key axis"),
        ("b s d | b t d | b s t e | bst | bse", "the values differ from query to query"),
        ("b s d | b s t d | b t e | bst | bse", "the keys differ from query to query"),
    ],
)
def test_what_no_attention_op_does_gets_a_sentence(operands: str, reason: str) -> None:
    _, found = _assign(*(part.strip() for part in operands.split("|")))
    assert isinstance(found, str), found
    assert reason in found


def _graph(*lines: str) -> Graph:
    head = "graph @test {\n dim batch = 3 in 1..\n dim seq = 5 in 1..\n"
    return parse(head + "\n".join(lines) + "\n}")


def test_stages_climb_layouts_factors_and_widening_casts() -> None:
    graph = _graph(
        "input %x : f16[batch, seq, 8]",
        "%a = aten.reshape(%x) {shape = [batch, seq, 2, 4]}",
        "%b = aten._to_copy(%a) {dtype = f32}",
        "%c = aten.mul.Scalar(%b) {other = 0.5}",
        "%d = aten.transpose.int(%c) {dim0 = 1, dim1 = 2}",
        "%e = aten.neg(%d)",
        "return %e",
    )
    b, h, s, d = (Atom(size) for size in (symbol("batch"), 2, symbol("seq"), 4))
    found = stages(Operand(graph.outputs[0], ((b,), (h,), (s,), (d,))))
    names = [stage.operand.value.name for stage in found]
    assert names == ["e", "d", "c", "b", "a", "x"]
    assert [stage.factor for stage in found] == [1.0, -1.0, -1.0, -0.5, -0.5, -0.5]
    assert found[-1].operand.axes == ((b,), (s,), (h, d))


@pytest.mark.parametrize("line", ["%y = aten.relu(%x)", "%y = aten._to_copy(%x) {dtype = f16}"])
def test_stages_stop_where_something_is_computed(line: str) -> None:
    graph = _graph("input %x : f32[batch, 4]", line, "return %y")
    found = stages(Operand(graph.outputs[0], ((Atom(symbol("batch")),), (Atom(4),))))
    assert [stage.operand.value.name for stage in found] == ["y"]


def test_the_cheapest_stage_needs_no_copy() -> None:
    graph = _graph(
        "input %x : f32[batch, seq, 8]",
        "%a = aten.reshape(%x) {shape = [batch, seq, 2, 4]}",
        "%b = aten.transpose.int(%a) {dim0 = 1, dim1 = 2}",
        "return %b",
    )
    b, h, s, d = (Atom(size) for size in (symbol("batch"), 2, symbol("seq"), 4))
    candidates = stages(Operand(graph.outputs[0], ((b,), (h,), (s,), (d,))))
    packed = cheapest(candidates, ((b,), (s,), (h, d)))
    assert packed is not None
    assert packed.operand.value is graph.inputs[0]
    as_it_is = cheapest(candidates, ((b,), (h,), (s,), (d,)))
    assert as_it_is is not None
    assert as_it_is.operand.value is graph.outputs[0]
    assert cheapest(candidates, ((b,), (s,))) is None
