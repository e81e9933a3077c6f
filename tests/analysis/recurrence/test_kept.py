"""Why a state stays in its loop: the sentence is true of the step."""

from __future__ import annotations

import json

import pytest

from attngraph.analysis.recurrence.kept import MOST_DECAYS, Kept, why_kept
from attngraph.ir import parse

_STEP = """graph @step {
  dim batch = 2 in 1..
  input %s : f32[batch, 2, 3, 4]
  input %o : f32[batch, 2, 3, 4]
  input %q : f32[batch, 2, 3]
  input %k : f32[batch, 2, 3]
  input %k2 : f32[batch, 2, 3]
  input %v : f32[batch, 2, 4]
  input %g : f32[batch, 2, 1]
  input %gs : f32[batch, 2, 3, 4]
  input %gv : f32[batch, 2, 4]
  input %mix : f32[3, 3]
  %k1 = aten.unsqueeze(%k) {dim = 3}
  %k21 = aten.unsqueeze(%k2) {dim = 3}
  %v1 = aten.unsqueeze(%v) {dim = 2}
  %q1 = aten.unsqueeze(%q) {dim = 3}
  %g1 = aten.unsqueeze(%g) {dim = 3}
  %a1 = aten.exp(%g1)
  %kept = aten.mul.Tensor(%s, %a1)
  %kv = aten.mul.Tensor(%k1, %v1)
  %new = aten.add.Tensor(%kept, %kv)
  %read = aten.mul.Tensor(%q1, %new)
  %z = aten.sum.dim_IntList(%read) {dim = [2]}
  return %new, %o, %z
}
"""
_INPUTS = """
  input %s : f32[batch, 2, 3, 4]
  input %o : f32[batch, 2, 3, 4]
  input %q : f32[seq, batch, 2, 3]
  input %k : f32[seq, batch, 2, 3]
  input %k2 : f32[seq, batch, 2, 3]
  input %v : f32[seq, batch, 2, 4]
  input %g : f32[seq, batch, 2, 1]
  input %gs : f32[seq, batch, 2, 3, 4]
  input %gv : f32[seq, batch, 2, 4]
  input %mix : f32[3, 3]
"""
_KEPT = "%kept = aten.mul.Tensor(%s, %a1)"
_NEW = "%new = aten.add.Tensor(%kept, %kv)"
_KNOWS = "%ks = aten.mul.Tensor({0}, {1})\n%had = aten.sum.dim_IntList(%ks) {{dim = [2]}}\n"


def _delta(read: str, key: str) -> str:
    """What is at a key is taken off: a product with `read`, which may be another state."""
    return (
        f"{_KNOWS.format(read, key)}%off = aten.sub.Tensor(%v, %had)\n"
        "%off1 = aten.unsqueeze(%off) {dim = 2}\n%ko = aten.mul.Tensor(%k1, %off1)\n"
        "%new = aten.add.Tensor(%kept, %ko)"
    )


# (what is changed, what is said, the op that is blamed)
WHY: dict[str, tuple[str, str, str, str]] = {
    "a squashed state": (
        _NEW, "%sum = aten.add.Tensor(%kept, %kv)\n%new = aten.tanh(%sum)",
        "no linear function of the state, for tanh", "aten.tanh"),
    "a square of the state": (
        _KEPT, "%kept = aten.mul.Tensor(%s, %s)",
        "no linear function of the state, for mul", "aten.mul.Tensor"),
    "another state": (
        _KEPT, "%kept = aten.mul.Tensor(%s, %o)", "decays by its own factor", "aten.mul.Tensor"),
    "terms that another state makes": (
        _KEPT, "%om = aten.mean.dim(%o) {dim = [-2, -1], keepdim = true}\n"
        "%kept = aten.mul.Tensor(%s, %om)", "isn't known to be at least 0", "aten.mul.Tensor"),
    "another state that is added": (
        _NEW, "%sum = aten.add.Tensor(%kept, %kv)\n%new = aten.add.Tensor(%sum, %o)",
        "isn't the product of one key and one value", "aten.add.Tensor"),
    "a decay of each number": (
        _KEPT, "%kept = aten.mul.Tensor(%s, %gs)", "decays by its own factor", "aten.mul.Tensor"),
    "a decay of each value feature": (
        _KEPT, "%gv1 = aten.unsqueeze(%gv) {dim = 2}\n%kept = aten.mul.Tensor(%s, %gv1)",
        "of each value feature", "aten.mul.Tensor"),
    "a matrix": (
        _KEPT, "%kept = aten.matmul(%mix, %s)", "mixed by a matrix", "aten.matmul"),
    "a correction by two keys": (
        _NEW, "%ks = aten.mul.Tensor(%k1, %s)\n%k2s = aten.mul.Tensor(%k21, %s)\n"
        "%r = aten.sum.dim_IntList(%ks) {dim = [2], keepdim = true}\n"
        "%r2 = aten.sum.dim_IntList(%k2s) {dim = [2], keepdim = true}\n"
        "%b = aten.mul.Tensor(%k21, %r)\n%b2 = aten.mul.Tensor(%q1, %r2)\n"
        "%both = aten.add.Tensor(%b, %b2)\n%more = aten.add.Tensor(%kept, %both)\n"
        "%new = aten.add.Tensor(%more, %kv)",
        "what more than one key reads", "aten.mul.Tensor"),
    "a correction by a key that a step hasn't got": (
        _NEW, "%ks = aten.mul.Tensor(%k1, %s)\n"
        "%r = aten.sum.dim_IntList(%ks) {dim = [2], keepdim = true}\n"
        "%b = aten.mul.Tensor(%k21, %r)\n%b2 = aten.mul.Tensor(%q1, %r)\n"
        "%both = aten.add.Tensor(%b, %b2)\n%more = aten.add.Tensor(%kept, %both)\n"
        "%new = aten.add.Tensor(%more, %kv)",
        "weren't all found", "aten.add.Tensor"),
    "two products": (
        _NEW, "%gv1 = aten.unsqueeze(%gv) {dim = 2}\n%kv2 = aten.mul.Tensor(%k21, %gv1)\n"
        "%both = aten.add.Tensor(%kv, %kv2)\n%new = aten.add.Tensor(%kept, %both)",
        "isn't the product of one key and one value", "aten.add.Tensor"),
    "two queries": (
        "%z =", "%q21 = aten.unsqueeze(%k2) {dim = 3}\n%read2 = aten.mul.Tensor(%q21, %new)\n"
        "%z2 = aten.sum.dim_IntList(%read2) {dim = [2]}\n%z1 = aten.sum.dim_IntList(%read) "
        "{dim = [2]}\n%z = aten.mul.Tensor(%z1, %z2)\n%unread =",
        "otherwise than by one query", "aten.sum.dim_IntList"),
    "elements that only move": (
        _NEW, "%new = aten.flip(%s) {dims = [2]}", "keeps earlier inputs", "aten.flip"),
}  # fmt: skip


def _why(old: str, new: str) -> list[Kept]:
    assert old in _STEP
    return _why_of(_STEP.replace(old, new))


def _why_of(step: str) -> list[Kept]:
    names = [line.split()[1] for line in _INPUTS.strip().splitlines()]
    dims = "  dim batch = 2 in 1..\n  dim seq = 5 in 1.."
    loop = f"{{body = {json.dumps(step)}, carried = 2, scanned = 7}}"
    graph = parse(
        f"graph @main {{\n{dims}{_INPUTS}  %last, %other, %y = attn.scan({', '.join(names)}) "
        f"{loop}\n  return %last, %y\n}}"
    )
    (node,) = graph
    return list(why_kept(node))


@pytest.mark.parametrize(("old", "new", "said", "op"), WHY.values(), ids=WHY)
def test_the_reason_and_its_node(old: str, new: str, said: str, op: str) -> None:
    (kept,) = _why(old, new)
    assert said in kept.why
    assert kept.node.op == op
    assert kept.is_matrix == ("earlier inputs" not in said)


def test_a_state_that_stays_as_it_is_has_no_reason() -> None:
    """The other state, which every step hands on."""
    for kept in _why(_NEW, _NEW):
        assert kept.node.op != "attn.scan"
    assert len(_why(_NEW, _NEW)) == 1


def _both(next_state: str) -> list[Kept]:
    """Of the two states, the second's next value is that."""
    return _why("return %new, %o, %z", f"{next_state}\n  return %new, %p, %z")


def test_a_state_of_which_another_one_is_made_whole() -> None:
    """Alone it would be read; the other one has more than a product added to it."""
    kept = _both("%p = aten.add.Tensor(%o, %new)")
    assert [each.node.outputs[0].name for each in kept] == ["p", "p"]
    assert "made of all of its state" in kept[0].why
    assert "isn't the product of one key and one value" in kept[1].why


def test_what_a_query_reads_may_make_another_state() -> None:
    kept = _both("%z2 = aten.unsqueeze(%z) {dim = 2}\n  %p = aten.add.Tensor(%o, %z2)")
    assert not any("made of all of its state" in each.why for each in kept)


def test_states_that_depend_on_each_other() -> None:
    step = "%om = aten.mean.dim(%o) {dim = [-2, -1], keepdim = true}\n  %kept ="
    text = _STEP.replace("%kept =", step).replace(
        "aten.mul.Tensor(%s, %a1)", "aten.mul.Tensor(%s, %om)"
    )
    circle = "%p = aten.add.Tensor(%o, %new)\n  return %new, %p, %z"
    kept = _why_of(text.replace("return %new, %o, %z", circle))
    assert all(each.why.endswith("and that one on it") for each in kept)
    assert len(kept) == 2


def test_a_number_for_each_head_is_no_matrix() -> None:
    step = (
        "graph @step {\n  input %m : f32[2, 3, 1, 1]\n  input %x : f32[2, 3, 1, 1]\n"
        "  %new = aten.maximum(%m, %x)\n  return %new\n}\n"
    )
    graph = parse(
        "graph @main {\n  input %m : f32[2, 3, 1, 1]\n  input %x : f32[5, 2, 3, 1, 1]\n"
        f"  %last = attn.scan(%m, %x) {{body = {json.dumps(step)}, carried = 1, scanned = 1}}\n"
        "  return %last\n}"
    )
    (node,) = graph
    (kept,) = why_kept(node)
    assert "for maximum" in kept.why
    assert not kept.is_matrix


def test_a_state_of_channels_has_no_keys() -> None:
    step = (
        "graph @step {\n  dim batch = 2 in 1..\n  input %s : f32[batch, 4]\n"
        "  input %x : f32[batch, 4]\n  %h = aten.mul.Scalar(%s) {other = 0.5}\n"
        "  %new = aten.add.Tensor(%h, %x)\n  return %new\n}\n"
    )
    graph = parse(
        "graph @main {\n  dim batch = 2 in 1..\n  dim seq = 5 in 1..\n  input %s : f32[batch, 4]\n"
        f"  input %x : f32[seq, batch, 4]\n  %last = attn.scan(%s, %x) {{body = {json.dumps(step)}"
        ", carried = 1, scanned = 1}\n  return %last\n}"
    )
    (node,) = graph
    (kept,) = why_kept(node)
    assert "one number for each channel" in kept.why
    assert not kept.is_matrix


@pytest.mark.parametrize("heads", [MOST_DECAYS, MOST_DECAYS + 1])
def test_a_sum_that_many_heads_decay(heads: int) -> None:
    """n' = e^(m − m') n + k, of a maximum that the loop carries too."""
    state, level = f"f32[batch, {heads}, 4]", f"f32[batch, {heads}]"
    dim = "  dim batch = 2 in 1..\n"
    step = (
        f"graph @step {{\n{dim}  input %m : {level}\n  input %n : {state}\n"
        f"  input %x : {level}\n  input %k : {state}\n"
        "  %top = aten.maximum(%m, %x)\n  %d = aten.sub.Tensor(%m, %top)\n  %e = aten.exp(%d)\n"
        "  %a = aten.unsqueeze(%e) {dim = 2}\n  %h = aten.mul.Tensor(%n, %a)\n"
        "  %new = aten.add.Tensor(%h, %k)\n  return %top, %new\n}\n"
    )
    inputs = f"  input %m : {level}\n  input %n : {state}\n"
    items = "".join(
        f"  input %{name} : {kind.replace('[', '[seq, ')}\n"
        for name, kind in (("x", level), ("k", state))
    )
    graph = parse(
        f"graph @main {{\n{dim}  dim seq = 5 in 1..\n{inputs}{items}"
        f"  %last, %sum = attn.scan(%m, %n, %x, %k) "
        f"{{body = {json.dumps(step)}, carried = 2, scanned = 2}}\n  return %last, %sum\n}}"
    )
    (node,) = graph
    (kept,) = [kept for kept in why_kept(node) if "maximum" not in kept.why]
    assert ("more than 16 numbers in a step" in kept.why) == (heads > MOST_DECAYS)
