"""Conditions on dims, such as `past + seq <= 12`: sympy relations under and, or, not.

The text form is Python's, and parses back.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import sympy
from torch.utils._sympy import functions as torch_sympy
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from attngraph.errors import IRError
from attngraph.ir.dims import (
    EXTREMES,
    LARGEST,
    UNREADABLE,
    Dim,
    DimInfo,
    as_dim,
    at_least,
    divide,
    format_dim,
    parse_dim,
    rewritten,
    shortened,
    shown_dim,
    symbol,
    symbols_of,
    syntax_of,
    without_floors,
)
from attngraph.ir.roundings import without_roundings
from attngraph.ir.settling import settled

Condition: TypeAlias = sympy.Basic

_RELATIONS: Mapping[type[ast.cmpop], type[sympy.Rel]] = {
    ast.LtE: sympy.Le,
    ast.Lt: sympy.Lt,
    ast.GtE: sympy.Ge,
    ast.Gt: sympy.Gt,
    ast.Eq: sympy.Eq,
    ast.NotEq: sympy.Ne,
}
_ROUNDINGS = (
    sympy.floor,
    sympy.ceiling,
    torch_sympy.FloorToInt,
    torch_sympy.CeilToInt,
    torch_sympy.TruncToInt,
)
_MOST_TERMS = 64  # of a sum that is factored, which takes long for more
_SIGNS = {"<=": "≤", ">=": "≥", "!=": "≠", "==": "="}


def format_condition(condition: Condition, of_dim: Callable[[Any], str] = format_dim) -> str:
    """Python's form; `parse_condition` reads it back."""
    if isinstance(condition, sympy.Rel):
        left, right = (of_dim(side) for side in condition.args)
        sign = "==" if isinstance(condition, sympy.Eq) else condition.rel_op
        return f"{left} {sign} {right}"
    if isinstance(condition, (sympy.And, sympy.Or)):
        word = " and " if isinstance(condition, sympy.And) else " or "
        parts = sorted(format_condition(part, of_dim) for part in condition.args)
        return word.join(f"({part})" for part in parts)
    if isinstance(condition, sympy.Not):
        return f"not ({format_condition(condition.args[0], of_dim)})"
    if condition in (sympy.true, sympy.false):
        return str(bool(condition))
    raise IRError(f"{condition!r} is not a condition on dims.")


def left_out_alone(condition: Condition) -> int | None:
    """The one size of its one dim that a condition leaves out, if that is all: 7 in n + 1 ≠ 8."""
    names = symbols_of(condition)
    if not isinstance(condition, sympy.Ne) or len(names) != 1:
        return None
    size = symbol(next(iter(names)))
    difference = sympy.expand(condition.lhs - condition.rhs)
    slope = difference.coeff(size)
    if not slope.is_number or slope == 0 or not (offset := difference - slope * size).is_number:
        return None
    left_out = -offset / slope
    return int(left_out) if left_out.is_Integer else None


def shown(condition: Condition) -> str:
    """For people: `past + seq ≤ 12`."""
    text = format_condition(condition, shown_dim)
    for sign, symbol_ in _SIGNS.items():
        text = text.replace(f" {sign} ", f" {symbol_} ")
    return text


def parse_condition(text: str) -> Condition:
    """Reads `past + seq <= 12 and seq % 2 == 0` and the like. Raises IRError naming the text."""

    def read(node: ast.expr) -> Condition:
        match node:
            case ast.Constant(value=bool(value)):
                return sympy.true if value else sympy.false
            case ast.BoolOp(op=op, values=values):
                joined = sympy.And if isinstance(op, ast.And) else sympy.Or
                return joined(*map(read, values))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return sympy.Not(read(operand))
            case ast.Compare(left=left, ops=ops, comparators=rights):
                sides = [sympy.sympify(parse_dim(ast.unparse(side))) for side in (left, *rights)]
                found = [
                    _RELATIONS[type(op)](a, b)
                    for op, a, b in zip(ops, sides, sides[1:], strict=False)
                ]
                return found[0] if len(found) == 1 else sympy.And(*found)
        raise ValueError

    try:
        return read(syntax_of(text))
    except (*UNREADABLE, KeyError, IRError) as error:
        raise IRError(f"{shortened(text)} is not a condition on dims.") from error


def over_integers(condition: Condition) -> Condition:
    """A relation of quotients as one of whole numbers, where it is: x / 8 > 1.5 as x > 12.

    `(x / 8).is_integer()` compares x / 8 with its own floor: x % 8 == 0.
    """
    if isinstance(condition, (sympy.And, sympy.Or, sympy.Not)):
        return condition.func(*map(over_integers, condition.args))
    if not isinstance(condition, sympy.Rel):
        return condition
    for quotient, other in (condition.args, condition.args[::-1]):
        if not isinstance(quotient, (torch_sympy.IntTrueDiv, torch_sympy.FloatTrueDiv)):
            continue
        above, below = quotient.args
        if not (above.is_integer and below.is_integer):
            continue
        rounded = other.args[0] if isinstance(other, torch_sympy.ToFloat) else None
        is_whole = isinstance(rounded, _ROUNDINGS) and rounded.args == (quotient,)
        if isinstance(condition, (sympy.Eq, sympy.Ne)) and is_whole:
            return condition.func(torch_sympy.Mod(above, below), 0)
        if other.is_number and below.is_positive:
            scaled = sympy.nsimplify(other, rational=True) * below
            sides = (above, scaled) if quotient is condition.args[0] else (scaled, above)
            numerator, denominator = sympy.fraction(sympy.together(scaled))
            if numerator.is_integer and denominator.is_Integer:
                sides = tuple(sympy.expand(side * denominator) for side in sides)
                return condition.func(*sides)
    return condition


def arranged(condition: Condition) -> Condition:
    """A relation of sums of products with each term once, on the side on which it is added, and
    without a factor that all have: sizes are above 0.

    4096 - past - seq ≥ 0 is past + seq ≤ 4096, and so is past + seq = min(4096, past + seq). Others
    are as they were.
    """
    condition = _of_an_extreme(condition)
    if not isinstance(condition, sympy.Rel) or condition.has(sympy.Function):
        return condition
    difference = sympy.expand(condition.lhs - condition.rhs)
    if difference.is_number or not difference.is_polynomial():
        return condition
    factors = sympy.Mul.make_args(sympy.factor_terms(difference))
    kept = [factor for factor in factors if not factor.is_positive or not factor.is_Atom]
    terms = sympy.Add.make_args(sympy.expand(sympy.Mul(*kept)))
    below = [term for term in terms if term.could_extract_minus_sign()]
    left = sympy.Add(*(term for term in terms if term not in below))
    right = sympy.Add(*(-term for term in below))
    is_either = isinstance(condition, (sympy.Eq, sympy.Ne)) and not right.is_number
    turned = str(right) < str(left) if is_either else condition.lhs == right
    if left.is_number or (turned and not right.is_number):
        return condition.reversed.func(right, left)
    return condition.func(left, right)


def _of_an_extreme(condition: Condition) -> Condition:
    """Where a size is the larger or smaller of itself and another one: that it is no smaller, or no
    larger. c − max(0, c − n) is the smaller of c and n."""
    if not isinstance(condition, sympy.Eq):
        return condition
    for size, other in (condition.args, condition.args[::-1]):
        for term in sympy.Add.make_args(other):
            factor, extreme = term.as_coeff_Mul()
            if factor not in (1, -1) or not isinstance(extreme, EXTREMES) or len(extreme.args) != 2:
                continue
            sides = [sympy.expand(other - term + factor * each) for each in extreme.args]
            for own, bound in (sides, sides[::-1]):
                if sympy.expand(own - size) == 0:
                    is_largest = isinstance(extreme, LARGEST) == (factor == 1)
                    return sympy.Ge(size, bound) if is_largest else sympy.Le(size, bound)
    return condition


def multiples(conditions: Iterable[Condition]) -> dict[str, int]:
    """The dims that conditions say are multiples of a number, with that number."""
    found: dict[str, int] = {}
    for condition in conditions:
        if not isinstance(condition, sympy.Eq) or not condition.args[1].is_zero:
            continue
        remainder = condition.args[0]
        if _is_mod(remainder) and remainder.args[0].is_Symbol and remainder.args[1].is_Integer:
            name, step = str(remainder.args[0]), int(remainder.args[1])
            found[name] = math.lcm(step, found.get(name, 1))
    return found


def condition_rewritten(condition: Condition, known: Mapping[str, Dim]) -> Condition:
    """The condition with expressions in the place of these dims."""
    return condition.xreplace({symbol(name): sympy.sympify(dim) for name, dim in known.items()})


def ties(conditions: Iterable[Condition]) -> dict[str, Dim]:
    """The dims that are equal to another one, each with the one that stands for all of these."""
    found: dict[str, Dim] = {}
    for condition in conditions:
        if isinstance(condition, sympy.Eq) and all(each.is_Symbol for each in condition.args):
            kept, other = (rewritten(each, found) for each in condition.args)
            if kept != other:
                found = {name: rewritten(dim, {str(other): kept}) for name, dim in found.items()}
                found[str(other)] = kept
    return found


def without_ties(value: Any, tied: Mapping[str, Dim]) -> Any:
    """An attribute or size in which a quotient names one of several equal dims.

    torch writes (8 * k) // q for what the equality of k and q makes 8.
    """
    if isinstance(value, (list, tuple)):
        return type(value)(without_ties(item, tied) for item in value)
    is_quotient = isinstance(value, sympy.Expr) and value.has(torch_sympy.FloorDiv)
    return rewritten(value, tied) if is_quotient else value


def _is_mod(expr: sympy.Basic) -> bool:
    return isinstance(expr, (torch_sympy.Mod, torch_sympy.PythonMod))


def _remainder(expr: sympy.Expr, infos: Mapping[str, DimInfo]) -> sympy.Expr:
    """0 where one size is a multiple of the other for every size of the dims, and the size itself
    where it is the smaller one, as one is whose multiple, by 2 or more, the other is."""
    number, divisor = expr.args
    if divide(as_dim(number), as_dim(divisor)) is not None:
        return sympy.Integer(0)
    is_less = at_least(number, 0, infos) and at_least(divisor - number, 1, infos)
    times = None if is_less else divide(as_dim(divisor), as_dim(number))
    if times is not None and at_least(number, 1, infos):
        is_less = at_least(sympy.sympify(times), 2, infos)
    return number if is_less else expr


def holds(
    condition: Condition, infos: Mapping[str, DimInfo], conditions: Container[Condition]
) -> bool:
    """Whether it holds for all sizes in the dims' ranges that meet these conditions.

    a > b follows from a ≥ b and a ≠ b.
    """
    if condition in conditions or always(condition, infos) is True:
        return True
    if not isinstance(condition, (sympy.Gt, sympy.Lt)):
        return False
    sides = [sympy.sympify(settled(side, infos)) for side in condition.args]
    weak = sympy.Ge if isinstance(condition, sympy.Gt) else sympy.Le
    apart = any(sympy.Ne(*pair) in conditions for pair in (sides, sides[::-1]))
    return apart and always(weak(*sides), infos) is True


def at_sizes(condition: Condition, sizes: Mapping[sympy.Symbol, sympy.Integer]) -> Condition:
    """The condition at some sizes; false where it divides by 0 there.

    As n % (n - 2) = 1 does at n = 2, which the model can't compute either. At n = 1 it is Python's
    1 % -1: torch's own remainder takes no numbers below 0.
    """
    place = dict(sizes)
    try:
        try:
            return condition.xreplace(place)
        except AssertionError:
            return condition.replace(torch_sympy.Mod, torch_sympy.PythonMod).xreplace(place)
    except ZeroDivisionError:
        return sympy.false


def always(condition: Condition, infos: Mapping[str, DimInfo]) -> bool | None:
    """Whether it holds for all sizes in the dims' ranges (True), for none (False), or for some."""
    if isinstance(condition, (sympy.And, sympy.Or)):
        parts = [always(part, infos) for part in condition.args]
        decides = isinstance(condition, sympy.Or)  # one true part is enough, or one false
        if decides in parts:
            return decides
        return None if None in parts else not decides
    if isinstance(condition, sympy.Rel):
        sides = (
            sympy.sympify(settled(side, infos)).replace(_is_mod, lambda e: _remainder(e, infos))
            for side in condition.args
        )
        condition = condition.func(*(side.replace(_is_quotient, _without_wholes) for side in sides))
    if condition in (sympy.true, sympy.false):
        return bool(condition)
    ranges = {}
    for free in condition.free_symbols:
        info = infos.get(str(free), DimInfo(low=0))
        high = sympy.oo if info.high is None else info.high
        ranges[free] = ValueRanges(info.low, high)
    forms = [condition]
    if isinstance(condition, sympy.Rel):
        # Of the sides' difference, terms that both have are counted once.
        difference = sympy.expand(condition.lhs - condition.rhs)
        if difference.is_zero or not isinstance(condition, (sympy.Eq, sympy.Ne)):
            forms = [condition.func(difference, 0)]
            without = without_floors(difference, ranges)
            forms += [] if without is None else [condition.func(without, 0)]
    for form in forms:
        if form in (sympy.true, sympy.false):
            return bool(form)
        with suppress(Exception):  # torch bounds what it knows; of anything else nothing is known
            found = bound_sympy(form, ranges)
            if found.lower == found.upper:
                return bool(found.lower)
    if not isinstance(condition, sympy.Rel):
        return None
    if isinstance(condition, (sympy.Eq, sympy.Ne)) and any(
        always(order(*condition.args), infos) for order in (sympy.Gt, sympy.Lt)
    ):  # one side is above the other at every size
        return isinstance(condition, sympy.Ne)
    if (follows := without_roundings(condition)) is not None:
        weaker, size = follows
        if always(sympy.Ge(size, 0), infos) and always(weaker, infos):
            return True
    weak = _weak(condition)
    if weak is not None and _by_factors(weak, infos):
        return True
    return _by_factors(condition, infos)


def _weak(condition: sympy.Rel) -> sympy.Rel | None:
    """A strict order of whole numbers as a weak one of their neighbours: n > -1 is n >= 0."""
    difference = condition.lhs - condition.rhs
    if not difference.is_integer:
        return None
    if isinstance(condition, sympy.StrictGreaterThan):
        return sympy.Ge(difference - 1, 0, evaluate=False)
    if isinstance(condition, sympy.StrictLessThan):
        return sympy.Le(difference + 1, 0, evaluate=False)
    return None


def _is_quotient(expr: sympy.Basic) -> bool:
    return isinstance(expr, torch_sympy.FloorDiv)


def _without_wholes(quotient: sympy.Expr) -> sympy.Expr:
    """(n - 3) // 2 as (n + 1) // 2 - 2: what the divisor divides stands outside, what is left of a
    number isn't below 0. So quotients that differ by a whole number are seen to."""
    total, size = quotient.args
    if not (size.is_Integer and size.is_positive and total.is_integer):
        return quotient
    inside, outside = sympy.Integer(0), sympy.Integer(0)
    for term in sympy.Add.make_args(sympy.expand(total)):
        factor, rest = term.as_coeff_Mul()
        if term.is_Integer:
            outside += term // size
            inside += term % size
        elif factor % size == 0 and rest.is_integer:
            outside += term / size
        else:
            inside += term
    return torch_sympy.FloorDiv(inside, size) + outside


def _is_product(term: sympy.Expr) -> bool:
    return term.is_Pow or len(term.as_powers_dict()) > 1


def _by_factors(condition: sympy.Rel, infos: Mapping[str, DimInfo]) -> bool | None:
    """Of sides whose difference is a product: it is 0 where a factor is, (n // 20 - 1)² at 20."""
    difference = sympy.expand(condition.lhs - condition.rhs)
    is_equation = isinstance(condition, (sympy.Eq, sympy.Ne))
    terms = sympy.Add.make_args(difference) if is_equation else difference.args
    if len(terms) > _MOST_TERMS or not any(_is_product(term) for term in terms):
        return None
    try:
        constant, powers = sympy.factor_list(difference)
    except sympy.PolynomialError:
        return None
    if [factor for factor, _ in powers] in ([], [difference]):
        return None
    if not is_equation:
        sign = _sign(constant, powers, infos)
        return None if sign is None else always(condition.func(sign, 0), infos)
    is_zero = [always(sympy.Eq(factor, 0), infos) for factor, _ in powers]
    if True in is_zero:
        return isinstance(condition, sympy.Eq)
    return None if None in is_zero else isinstance(condition, sympy.Ne)


def _sign(
    constant: sympy.Expr, powers: Sequence[tuple[sympy.Expr, int]], infos: Mapping[str, DimInfo]
) -> sympy.Expr | None:
    """A product's: ±1, or ± a number from 0 on where a factor may be 0; None if it has either."""
    sign: sympy.Expr = sympy.sign(constant)
    for factor, power in powers:
        above, below = (always(rel(factor, 0), infos) is True for rel in (sympy.Ge, sympy.Le))
        if always(sympy.Ne(factor, 0), infos) is not True:
            sign *= sympy.Symbol("any factor", integer=True, nonnegative=True)
        if power % 2 and not above:
            if not below:
                return None
            sign = -sign
    return sign
