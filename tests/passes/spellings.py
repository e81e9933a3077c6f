"""A graph for each spelling that isn't the normal form, by the op that is spelled.

docs/normal-form.md shows each of them with what canonicalize makes of it.
"""

from __future__ import annotations

import re

from attngraph.ir import Graph, parse

_X = "x : f32[n, 4, 6]"
_MATRICES = "x : f32[4, 6], y : f32[6, 5]"
_MASKED = "x : f32[n, 4], m : bool[n, 4]"
SPELLINGS = {
    "aten.positive": (_X, "(%x)"),
    "aten.resolve_conj": (_X, "(%x)"),
    "aten.resolve_neg": (_X, "(%x)"),
    "aten.clone": (_X, "(%x)"),
    "aten.contiguous": (_X, "(%x)"),
    "aten.alias": (_X, "(%x)"),
    "aten.detach": (_X, "(%x)"),
    "aten.lift_fresh_copy": (_X, "(%x)"),
    "aten.dropout": (_X, "(%x) {p = 0.1, train = false}"),
    "aten.feature_dropout": (_X, "(%x) {p = 0.1, train = false}"),
    "aten.alpha_dropout": (_X, "(%x) {p = 0.1, train = false}"),
    "aten.feature_alpha_dropout": (_X, "(%x) {p = 0.1, train = false}"),
    "aten.to.dtype": (_X, "(%x) {dtype = f64}"),
    "aten.to.dtype_layout": (_X, "(%x) {dtype = f64}"),
    "aten.to.device": (_X, '(%x) {device = "cpu", dtype = f64}'),
    "aten.to.other": (f"{_X}, y : f64[2]", "(%x, %y)"),
    "aten.type_as": (f"{_X}, y : f64[2]", "(%x, %y)"),
    "aten.full": ("", "() {size = [4], fill_value = 2.0}"),
    "aten.full_like": (_X, "(%x) {fill_value = 2.0}"),
    "aten.fill.Scalar": (_X, "(%x) {value = 2.0}"),
    "aten.new_full": (_X, "(%x) {size = [4], fill_value = 2.0}"),
    "aten.ones": ("", "() {size = [4]}"),
    "aten.ones_like": (_X, "(%x)"),
    "aten.new_ones": (_X, "(%x) {size = [4]}"),
    "aten.zeros": ("", "() {size = [4]}"),
    "aten.zeros_like": (_X, "(%x)"),
    "aten.new_zeros": (_X, "(%x) {size = [4]}"),
    "aten.scalar_tensor": ("", "() {s = 2.0, dtype = f32}"),
    "aten.eye": ("", "() {n = 4}"),
    "aten.eye.m": ("", "() {n = 4, m = 5}"),
    "aten.where.Scalar": ("m : bool[n, 4]", "(%m) {self = 0.0, other = -inf}"),
    "aten.where.ScalarSelf": (_MASKED, "(%m, %x) {self = -inf}"),
    "aten.where.ScalarOther": (_MASKED, "(%m, %x) {other = -inf}"),
    "aten.masked_fill.Scalar": (_MASKED, "(%x, %m) {value = -inf}"),
    "aten.masked_fill.Tensor": (f"{_MASKED}, y : f64[]", "(%x, %m, %y)"),
    "aten.softmax.int": ("x : f16[n, 4]", "(%x) {dim = -1, dtype = f32}"),
    "aten.special_softmax": (_X, "(%x) {dim = -1}"),
    "aten._softmax": (_X, "(%x) {dim = -1, half_to_float = false}"),
    "aten.log_softmax.int": ("x : f16[n, 4]", "(%x) {dim = -1, dtype = f32}"),
    "aten.special_log_softmax": (_X, "(%x) {dim = -1}"),
    "aten._log_softmax": (_X, "(%x) {dim = -1, half_to_float = false}"),
    "aten.mm": (_MATRICES, "(%x, %y)"),
    "aten.bmm": ("x : f32[n, 4, 6], y : f32[n, 6, 5]", "(%x, %y)"),
    "aten.mv": ("x : f32[4, 6], y : f32[6]", "(%x, %y)"),
    "aten.dot": ("x : f32[6], y : f32[6]", "(%x, %y)"),
    "aten.rms_norm": ("x : f32[n, 6]", "(%x) {normalized_shape = [6]}"),
    "aten.reshape": (_X, "(%x) {shape = [-1, 24]}"),
    "aten.view": (_X, "(%x) {size = [-1, 24]}"),
    "aten._unsafe_view": (_X, "(%x) {size = [-1, 24]}"),
    "aten._reshape_copy": (_X, "(%x) {size = [-1, 24]}"),
    "aten.view_copy": (_X, "(%x) {size = [-1, 24]}"),
    "aten.view_as": (f"{_X}, y : f32[n, 24]", "(%x, %y)"),
    "aten.reshape_as": (f"{_X}, y : f32[n, 24]", "(%x, %y)"),
    "aten.squeeze": ("x : f32[4, 1, 6]", "(%x)"),
    "aten.squeeze.dim": ("x : f32[n, 1, 6]", "(%x) {dim = 1}"),
    "aten.squeeze.dims": ("x : f32[n, 1, 6]", "(%x) {dim = [1]}"),
    "aten.unsqueeze": (_X, "(%x) {dim = 1}"),
    "aten.flatten.using_ints": (_X, "(%x) {start_dim = 1}"),
    "aten.unflatten.int": (_X, "(%x) {dim = 2, sizes = [2, 3]}"),
    "aten.ravel": (_X, "(%x)"),
    "aten.permute": (_X, "(%x) {dims = [0, -1, 1]}"),
    "aten.t": ("x : f32[n, 4]", "(%x)"),
    "aten.mT": (_X, "(%x)"),
    "aten.numpy_T": ("x : f32[n, 4]", "(%x)"),
    "aten.transpose.int": (_X, "(%x) {dim0 = 1, dim1 = 2}"),
    "aten.swapdims": (_X, "(%x) {dim0 = 1, dim1 = 2}"),
    "aten.swapaxes": (_X, "(%x) {axis0 = 1, axis1 = 2}"),
    "aten.movedim.int": (_X, "(%x) {source = 0, destination = 2}"),
    "aten.movedim.intlist": (_X, "(%x) {source = [0], destination = [2]}"),
    "aten.moveaxis.int": (_X, "(%x) {source = 0, destination = 2}"),
    "aten.moveaxis.intlist": (_X, "(%x) {source = [0], destination = [2]}"),
    "aten.expand": ("x : f32[n, 1, 6]", "(%x) {size = [-1, 4, -1]}"),
    "aten.expand_copy": ("x : f32[n, 1, 6]", "(%x) {size = [-1, 4, -1]}"),
    "aten.expand_as": ("x : f32[1, 4], y : f32[n, 4]", "(%x, %y)"),
    "aten.broadcast_to": ("x : f32[n, 1]", "(%x) {size = [n, 4]}"),
    "aten.repeat": ("x : f32[n, 1]", "(%x) {repeats = [1, 4]}"),
    "aten.tile": ("x : f32[n, 1]", "(%x) {dims = [1, 4]}"),
    "aten.narrow": (_X, "(%x) {dim = 1, start = 1, length = 2}"),
    "aten.chunk": (_X, "(%x) {chunks = 2, dim = -1}"),
    "aten.unsafe_chunk": (_X, "(%x) {chunks = 2, dim = -1}"),
    "aten.split.Tensor": (_X, "(%x) {split_size = 3, dim = -1}"),
    "aten.split.sizes": (_X, "(%x) {split_size = [2, 4], dim = -1}"),
    "aten.split_with_sizes": (_X, "(%x) {split_sizes = [2, 4], dim = -1}"),
    "aten.unsafe_split.Tensor": (_X, "(%x) {split_size = 3, dim = -1}"),
    "aten.unsafe_split_with_sizes": (_X, "(%x) {split_sizes = [2, 4], dim = -1}"),
    "aten.tensor_split.sections": (_X, "(%x) {sections = 2, dim = -1}"),
    "aten.tensor_split.indices": (_X, "(%x) {indices = [2], dim = -1}"),
    "aten.copy": ("x : f32[n, 4], y : f32[4]", "(%x, %y)"),
}
_TWO = ("chunk", "split")
_INPUT = re.compile(r", (?=\w+ :)")


def spelled(op: str) -> Graph:
    """The graph of one node."""
    inputs, call = SPELLINGS[op]
    results = "%a, %b" if any(name in op for name in _TWO) else "%a"
    given = "".join(f"input %{each}\n" for each in _INPUT.split(inputs) if each) if inputs else ""
    return parse(
        f"graph @main {{\ndim n = 3 in 1..\n{given}{results} = {op}{call}\nreturn {results}\n}}"
    )
