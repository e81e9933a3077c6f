"""split-products: every product is one of two operands that share each summed axis.

An `einsum` of three or more operands is cut into pairs, the cheapest first (as opt_einsum's greedy
path); what only one operand is summed over is summed before. `tensordot`, `inner` and `bilinear`
are einsums, and `cosine_similarity` is a sum of products of normalised vectors.
"""

from __future__ import annotations

import itertools
import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attngraph.analysis.layout.contraction import einsum_terms
from attngraph.ir import Builder, Dim, Graph, Node, Remark, Value
from attngraph.ir.dims import substitute
from attngraph.ir.ops import attribute, input_of
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.manager import GraphPass

_OPS = frozenset(
    f"aten.{name}" for name in ("einsum", "inner", "tensordot", "bilinear", "cosine_similarity")
)


@dataclass(frozen=True, slots=True)
class _Term:
    """An operand of an einsum: the value and a letter per dim."""

    value: Value
    letters: str


_REORDERS = "The operands of a product are multiplied in pairs, the cheapest first."


class SplitProducts(GraphPass, name="split-products", exact=False):
    """Cuts products of several operands into products of two.

    With `exact_only`, not those of three or more, which are multiplied in another order.
    """

    exact_only: bool = False

    def run(self, graph: Graph) -> list[Remark]:
        build, checked = Builder(graph), Checked(graph, self.name, exact_only=self.exact_only)
        hints = {name: info.hint for name, info in graph.dims.items()}
        for node in list(graph):
            reorders = node.op in _OPS and len(node.inputs) > 2
            what = _REORDERS * reorders
            if node.op not in _OPS or not checked.allows(what):
                continue
            build.at(node, node.loc)
            result = _rewritten(build, node, hints)
            pairs = [] if result is None else [(node.output, result)]
            if pairs and checked.replace(pairs, reassociates=what):
                graph.erase(node)
        return checked.remarks


def _rewritten(build: Builder, node: Node, hints: Mapping[str, int]) -> Value | None:
    match node.op:
        case "aten.einsum":
            return _einsum(build, node, hints)
        case "aten.inner":
            return _inner(build, node)
        case "aten.tensordot":
            return _tensordot(build, node)
        case "aten.bilinear":
            return _bilinear(build, node, hints)
        case "aten.cosine_similarity":
            return _cosine(build, node)
    return None


def _einsum(build: Builder, node: Node, hints: Mapping[str, int]) -> Value | None:
    terms, output = einsum_terms(node)
    if any(len(set(term)) != len(term) for term in terms):
        return None  # a diagonal
    found = [_Term(v, t) for v, t in zip(input_of(node, "tensors"), terms, strict=True)]
    if len(found) < 2 or not _sizes_agree(found):
        return None
    is_plain = not any(_alone(found, term, output) for term in found)
    if len(found) == 2 and is_plain and not _is_elementwise(found[0], found[1], output):
        return None
    return _pairwise(build, found, output, hints)


def _sizes_agree(terms: Sequence[_Term]) -> bool:
    """Whether no axis of size 1 is broadcast against a longer one of the same letter."""
    sizes: dict[str, Dim] = {}
    for term in terms:
        for letter, size in zip(term.letters, term.value.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                return False
    return True


def _alone(terms: Sequence[_Term], term: _Term, output: str) -> str:
    """The letters that are summed over and that no other operand has."""
    others = output + "".join(other.letters for other in terms if other is not term)
    return "".join(letter for letter in term.letters if letter not in others)


def _pairwise(
    build: Builder, terms: Sequence[_Term], output: str, hints: Mapping[str, int]
) -> Value:
    rest = [_summed(build, term, _alone(terms, term, output)) for term in terms]
    while len(rest) > 1:
        first, second = min(
            itertools.combinations(rest, 2), key=lambda pair: _growth(rest, pair, output, hints)
        )
        kept = output if len(rest) == 2 else _kept(rest, (first, second), output)
        product = _product(build, first, second, kept)
        rest = [term for term in rest if term is not first and term is not second]
        rest.insert(0, _Term(product, kept))
    return rest[0].value


def _product(build: Builder, first: _Term, second: _Term, output: str) -> Value:
    """An einsum, or a multiplication where nothing is summed."""
    if _is_elementwise(first, second, output):
        spread = (_spread(build, term, output) for term in (first, second))
        return build("aten.mul.Tensor", *spread)
    equation = f"{first.letters},{second.letters}->{output}"
    return build("aten.einsum", first.value, second.value, equation=equation)


def _is_elementwise(first: _Term, second: _Term, output: str) -> bool:
    return set(output) == {*first.letters, *second.letters}


def _spread(build: Builder, term: _Term, output: str) -> Value:
    """The operand with its axes in the order of `output`, and of size 1 where it has none."""
    order = [term.letters.index(letter) for letter in output if letter in term.letters]
    value = term.value
    if order != sorted(order):
        value = build("aten.permute", value, dims=order)
    sizes = iter(value.shape)
    shape = [next(sizes) if letter in term.letters else 1 for letter in output]
    return value if len(shape) == len(order) else build("aten.reshape", value, shape=shape)


def _summed(build: Builder, term: _Term, letters: str) -> _Term:
    if not letters:
        return term
    dims = [term.letters.index(letter) for letter in letters]
    kept = "".join(letter for letter in term.letters if letter not in letters)
    if all(term.value.shape[dim] == 1 for dim in dims):
        shape = [size for dim, size in enumerate(term.value.shape) if dim not in dims]
        return _Term(build("aten.reshape", term.value, shape=shape), kept)
    return _Term(build("aten.sum.dim_IntList", term.value, dim=dims), kept)


def _kept(terms: Sequence[_Term], pair: tuple[_Term, _Term], output: str) -> str:
    """The letters that a product of two keeps: those that the result or another operand has."""
    wanted = output + "".join(term.letters for term in terms if term not in pair)
    both = dict.fromkeys(pair[0].letters + pair[1].letters)
    return "".join(letter for letter in both if letter in wanted)


def _growth(
    terms: Sequence[_Term], pair: tuple[_Term, _Term], output: str, hints: Mapping[str, int]
) -> int:
    """Elements of a product of two less those of the two."""
    sizes = {
        letter: int(substitute(size, hints))
        for term in pair
        for letter, size in zip(term.letters, term.value.shape, strict=True)
    }
    groups = (_kept(terms, pair, output), pair[0].letters, pair[1].letters)
    product, left, right = (math.prod(sizes[letter] for letter in group) for group in groups)
    return product - left - right


def _inner(build: Builder, node: Node) -> Value | None:
    left, right = node.inputs
    if left is None or right is None or not left.shape or not right.shape:
        return None
    rows, columns = len(left.shape) - 1, len(right.shape) - 1
    letters = string.ascii_letters
    first, second = letters[:rows], letters[rows : rows + columns]
    equation = f"{first}Z,{second}Z->{first}{second}"
    return build("aten.einsum", left, right, equation=equation)


def _tensordot(build: Builder, node: Node) -> Value | None:
    left, right = node.operands
    pairs = list(zip(attribute(node, "dims_self"), attribute(node, "dims_other"), strict=True))
    rank = len(left.shape)
    first = string.ascii_lowercase[:rank]
    second = list(string.ascii_uppercase[: len(right.shape)])
    if any(left.shape[i] != right.shape[j] for i, j in pairs):
        return None
    for i, j in pairs:
        second[j] = first[i]
    summed = {first[i] for i, _ in pairs}
    output = "".join(c for c in (*first, *second) if c not in summed)
    equation = f"{first},{''.join(second)}->{output}"
    return build("aten.einsum", left, right, equation=equation)


def _bilinear(build: Builder, node: Node, hints: Mapping[str, int]) -> Value | None:
    left, right, weight = node.operands[:3]
    batch = string.ascii_lowercase[: len(left.shape) - 1]
    terms = [_Term(left, f"{batch}X"), _Term(right, f"{batch}Y"), _Term(weight, "OXY")]
    result = _pairwise(build, terms, f"{batch}O", hints)
    bias = input_of(node, "bias")
    return result if bias is None else build("aten.add.Tensor", result, bias)


def _cosine(build: Builder, node: Node) -> Value | None:
    left, right = node.operands
    if not left.dtype.is_floating_point:
        return None
    rank = max(len(left.shape), len(right.shape))
    dim = attribute(node, "dim") % rank - rank

    def normalised(value: Value) -> Value | None:
        if len(value.shape) < -dim:
            return None
        norm = build("aten.linalg_vector_norm", value, ord=2, dim=[dim], keepdim=True)
        low = build("aten.clamp_min", norm, min=attribute(node, "eps"))
        return build("aten.div.Tensor", value, low)

    first, second = normalised(left), normalised(right)
    if first is None or second is None or left.dtype != right.dtype:
        return None
    return build("aten.sum.dim_IntList", build("aten.mul.Tensor", first, second), dim=[dim])
