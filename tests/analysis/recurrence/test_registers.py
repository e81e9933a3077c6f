"""A state that keeps a convolution's last inputs: only where elements are moved, and as far."""

from __future__ import annotations

import pytest

from attngraph.analysis.recurrence.registers import Register, read_register
from attngraph.ir import parse

_STEP = """graph @step {
  dim batch = 2 in 1..
  input %s : f32[batch, 6, 3]
  input %x : f32[batch, 6]
  input %other : f32[batch, 6]
  input %w : f32[6, 1, 3]
  input %bias : f32[6]
  %x1 = aten.unsqueeze(%x) {dim = 2}
  %past = aten.slice.Tensor(%s) {dim = 2, start = 1, end = 3}
  %y, %n = attn.causal_conv(%x1, %w, %bias, %past)
  %all = aten.cat(%s, %x1) {dim = 2}
  %after = aten.slice.Tensor(%all) {dim = 2, start = 1, end = 4}
  %given = aten.tanh(%y)
  return %after, %given
}
"""


def _read(*changes: tuple[str, str]) -> Register | None:
    text = _STEP
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    graph = parse(text)
    return read_register(graph.inputs[0], graph.outputs[0], graph.outputs[1:])


_AFTER = "aten.slice.Tensor(%all) {dim = 2, start = 1, end = 4}"
_ROLLED = (
    ("%all = aten.cat(%s, %x1) {dim = 2}", "%head = aten.slice.Tensor(%s) {dim = 2, start = 1}"),
    (_AFTER, "aten.cat(%head, %x1) {dim = 2}"),
)
READ = {
    "joined and cut": (),
    "cut and joined": _ROLLED,
    "the middle of what is joined": ((_AFTER, "aten.slice.Tensor(%all) {dim = 2, start = -3}"),),
    "through a permutation": (
        ("%all = aten.cat(%s, %x1)", "%t = aten.permute(%s) {dims = [2, 0, 1]}\n"
         "%t2 = aten.permute(%t) {dims = [1, 2, 0]}\n%all = aten.cat(%t2, %x1)"),
    ),
    "each place by itself": (
        ("%all = aten.cat(%s, %x1) {dim = 2}", "%a, %b, %c = aten.unbind.int(%s) {dim = 2}"),
        (_AFTER, "aten.stack(%b, %c, %x) {dim = 2}"),
    ),
    "the convolution as the next state has it": (
        ("aten.slice.Tensor(%s) {dim = 2, start = 1, end = 3}",
         "aten.slice.Tensor(%s) {dim = 2, start = -2}"),
    ),
}  # fmt: skip
OTHERS = {
    "two places at once": (
        ("aten.cat(%s, %x1)", "aten.cat(%s, %x1, %x1)"),
        (_AFTER, "aten.slice.Tensor(%all) {dim = 2, start = 2, end = 5}"),
    ),
    "the first place is kept": ((_AFTER, "aten.slice.Tensor(%all) {dim = 2, start = 0, end = 3}"),),
    "backwards": (
        ("aten.cat(%s, %x1)", "aten.cat(%x1, %s)"),
        (_AFTER, "aten.slice.Tensor(%all) {dim = 2, start = 0, end = 3}"),
    ),
    "channels in another order": (
        ("%all = aten.cat(%s, %x1)", "%t = aten.flip(%s) {dims = [1]}\n%all = aten.cat(%t, %x1)"),
    ),
    "rows in another order": (
        ("%all = aten.cat(%s, %x1)", "%t = aten.flip(%s) {dims = [0]}\n%all = aten.cat(%t, %x1)"),
    ),
    "another item is convolved": (("attn.causal_conv(%x1,", "attn.causal_conv(%o1,"),
                                  ("%x1 = ", "%o1 = aten.unsqueeze(%other) {dim = 2}\n%x1 = ")),
    "another item is kept": (("aten.cat(%s, %x1)", "aten.cat(%s, %o1)"),
                             ("%x1 = ", "%o1 = aten.unsqueeze(%other) {dim = 2}\n%x1 = ")),
    "the first places are convolved": (
        ("aten.slice.Tensor(%s) {dim = 2, start = 1, end = 3}",
         "aten.slice.Tensor(%s) {dim = 2, start = 0, end = 2}"),
    ),
    "no place of the state is convolved": (("%bias, %past)", "%bias)"),),
    "the state is given as well": (("aten.tanh(%y)", "aten.cat(%y, %s) {dim = 2}"),),
    "the state is scaled": (
        ("%all = aten.cat(%s, %x1)", "%t = aten.mul.Scalar(%s) {other = 1.0000001}\n"
         "%all = aten.cat(%t, %x1)"),
    ),
    "a channel's item is another one's": (
        ("%x1 = aten.unsqueeze(%x) {dim = 2}",
         "%x1 = aten.unsqueeze(%x) {dim = 2}\n%x2 = aten.flip(%x1) {dims = [1]}"),
        ("aten.cat(%s, %x1)", "aten.cat(%s, %x2)"),
    ),
    # each place that a step keeps is counted by the rows: with two of them, it is the next one
    "as many places as there are rows": (
        ("%all = aten.cat(%s, %x1) {dim = 2}",
         "%a = aten.slice.Tensor(%s) {dim = 2, start = batch - 1, end = batch}\n"
         "%b = aten.slice.Tensor(%s) {dim = 2, start = 2}"),
        (_AFTER, "aten.cat(%a, %b, %x1) {dim = 2}"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("changes", READ.values(), ids=READ)
def test_a_register_is_read(changes: tuple[tuple[str, str], ...]) -> None:
    found = _read(*changes)
    assert found is not None
    assert (found.item.name, found.result.name, found.reach) == ("x1", "y", 2) or (
        found.item.name == "x"
    )
    assert found.weight.name == "w"
    assert found.bias is not None
    assert found.bias.name == "bias"


@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS)
def test_what_only_looks_like_one_is_none(changes: tuple[tuple[str, str], ...]) -> None:
    assert _read(*changes) is None


def test_a_convolution_with_gaps_reads_other_places() -> None:
    assert _read(("%past)", "%past) {dilation = 2}"), ("f32[6, 1, 3]", "f32[6, 1, 2]")) is None


def test_a_state_of_open_length_is_none() -> None:
    graph = parse(
        "graph @step {\n  dim n = 3 in 2..\n  input %s : f32[2, 6, n]\n  input %x : f32[2, 6, 1]\n"
        "  %all = aten.cat(%s, %x) {dim = 2}\n"
        "  %after = aten.slice.Tensor(%all) {dim = 2, start = 1}\n  return %after\n}"
    )
    assert read_register(graph.inputs[0], graph.outputs[0], []) is None
