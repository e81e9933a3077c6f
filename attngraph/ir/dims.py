"""Dimensions: integers, or sympy expressions over named symbols such as `batch` and `seq`.

torch.export speaks sympy already, so its expressions are kept; only their symbols are renamed to
the user's. The text form is Python arithmetic and parses back.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
from sympy.printing.precedence import PRECEDENCE
from torch.utils._sympy import functions as torch_sympy
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from attngraph.errors import IRError

Dim: TypeAlias = int | sympy.Expr


@dataclass(frozen=True, slots=True)
class DimInfo:
    """The range of a named dimension and a typical size (`hint`); `high` None means unbounded."""

    low: int = 2
    high: int | None = None
    hint: int = 8


LARGEST = (torch_sympy.Max, sympy.Max)
EXTREMES = (*LARGEST, torch_sympy.Min, sympy.Min)
_OF_A_RUN = re.compile(r"u\d+_*")


@functools.lru_cache(maxsize=16384)
def symbol(name: str) -> sympy.Symbol:
    """The one symbol of that name: an integer ≥ 1, or any where only a run tells it (`u0`, …)."""
    if is_of_a_run(name):
        return sympy.Symbol(name, integer=True)
    return sympy.Symbol(name, integer=True, positive=True)


def is_of_a_run(name: str) -> bool:
    """Whether only a run tells the size of that name, as with nonzero()."""
    return _OF_A_RUN.fullmatch(name) is not None


def as_dim(expr: Any) -> Dim:
    """A plain int where the expression is a number, else the expression."""
    if isinstance(expr, int):
        return expr
    if isinstance(expr, sympy.Expr):
        return int(expr) if expr.is_Integer else expr
    raise IRError(f"{expr!r} is not a dimension: expected an int or a sympy expression.")


def product(dims: Iterable[Dim]) -> Dim:
    """The number of elements of a shape."""
    return as_dim(sympy.Mul(*[sympy.sympify(dim) for dim in dims]))


@functools.lru_cache(maxsize=16384)
def _equal(a: sympy.Expr, b: sympy.Expr) -> bool:
    difference = sympy.expand(a - b)
    if difference != 0 and difference.has(torch_sympy.FloorDiv):
        difference = sympy.expand(difference.replace(torch_sympy.FloorDiv, _quotient))
    if difference != 0 and difference.has(*EXTREMES):
        return bool(_within_extremes(a) == _within_extremes(b))
    return bool(difference == 0)


def _within_extremes(expr: sympy.Expr) -> sympy.Expr:
    """Moves what is added to a min or max inside of it: min(5, n) − 2 as min(3, n − 2), and
    n − max(0, n − 2) as min(n, 2).
    """

    def moved(total: sympy.Expr) -> sympy.Expr:
        for term in sympy.Add.make_args(total):
            factor, extreme = term.as_coeff_Mul()
            if not isinstance(extreme, EXTREMES):
                continue
            largest = isinstance(extreme, LARGEST) == bool(factor > 0)
            made: Any = torch_sympy.Max if largest else torch_sympy.Min
            rest = total - term
            return made(*(sympy.expand(rest + factor * each) for each in extreme.args))
        return total

    return sympy.expand(expr).replace(lambda each: each.is_Add or each.is_Mul, moved)


def _quotient(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
    """a // b in one form of those that are equal for every size.

    It is a / b where that is whole, as s·s // s is. By a number, ⌊(⌊x / m⌋ + c) / b⌋ is
    ⌊(x + c·m) / (m·b)⌋, and multiples of b are added behind: (n − 3) // 2 is (n + 1) // 2 − 2.
    """
    exact = divide(as_dim(a), as_dim(b))
    if exact is not None:
        return sympy.sympify(exact)
    quotient: Any = torch_sympy.FloorDiv
    if not (b.is_Integer and b > 0):
        return quotient(a, b)
    terms = sympy.Add.make_args(sympy.expand(a))
    for term in terms:
        if isinstance(term, torch_sympy.FloorDiv) and term.args[1].is_Integer and term.args[1] > 0:
            base, by = term.args
            others = sympy.Add(*(each for each in terms if each is not term))
            if others.is_integer:
                return _quotient(base + others * by, by * b)
    behind, rest = [], []
    for term in terms:
        factor, of = term.as_coeff_Mul()
        is_whole = factor.is_Integer and of.is_integer
        times, left = divmod(factor, b) if is_whole else (sympy.Integer(0), factor)
        behind.append(times * of)
        rest.append(left * of)
    return sympy.Add(*behind, quotient(sympy.Add(*rest), b))


def same(a: Dim, b: Dim) -> bool:
    """Provably equal for every size."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return a is b or _equal(sympy.sympify(a), sympy.sympify(b))


def same_shape(a: Iterable[Dim], b: Iterable[Dim]) -> bool:
    """Provably equal shapes."""
    a, b = tuple(a), tuple(b)
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


def divide(a: Dim, b: Dim) -> Dim | None:
    """a / b where that is provably a whole number, else None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    quotient = sympy.cancel(sympy.sympify(a) / sympy.sympify(b))
    numerator, denominator = quotient.as_numer_denom()
    return as_dim(numerator) if denominator == 1 else None


def ceiling(a: Dim, b: Dim) -> Dim:
    """a / b, rounded up."""
    above, below = sympy.sympify(a), sympy.sympify(b)
    return as_dim(_quotient(above + below - 1, below))


def least(a: Dim, b: Dim) -> Dim:
    """The smaller of two sizes."""
    smaller: Any = torch_sympy.Min
    return as_dim(smaller(sympy.sympify(a), sympy.sympify(b)))


def greatest(a: Dim, b: Dim) -> Dim:
    """The larger of two sizes."""
    larger: Any = torch_sympy.Max
    return as_dim(larger(sympy.sympify(a), sympy.sympify(b)))


def tells(dim: Dim) -> bool:
    """Whether a size says what the one unknown name in it is: (n + 3) // 4 is that of several n."""
    return not sympy.sympify(dim).has(sympy.Function)


def symbols_of(value: object) -> frozenset[str]:
    """Names of the dims that an attribute value (possibly a nested list) depends on."""
    if isinstance(value, sympy.Basic):
        return frozenset(s.name for s in value.free_symbols)
    if isinstance(value, (list, tuple)):
        return frozenset().union(*map(symbols_of, value))
    return frozenset()


CHOOSING = frozenset({"Max", "Min", "Piecewise"})
"""Functions that make a size one of several expressions, by the numbers."""
DIVIDING = frozenset({"FloorDiv", "Mod", "PythonMod", "CleanDiv", "CeilDiv", "floor"})


def functions_of(value: object) -> frozenset[str]:
    """The names of the functions in an expression, or in those of a list."""
    if isinstance(value, (list, tuple)):
        return frozenset[str]().union(*map(functions_of, value))
    if not isinstance(value, sympy.Basic):
        return frozenset()
    return frozenset(part.func.__name__ for part in sympy.preorder_traversal(value))


def substitute(value: Any, sizes: Mapping[str, int]) -> Any:
    """Replaces every expression in an attribute value by its number for the given sizes."""
    if isinstance(value, sympy.Basic):
        try:
            number = value.xreplace({symbol(name): sympy.Integer(n) for name, n in sizes.items()})
        except ZeroDivisionError as error:
            raise IRError(f"{value} divides by zero at {dict(sizes)}.") from error
        except TypeError as error:  # a power of a number below 0
            raise IRError(f"{value} is no number at {dict(sizes)}.") from error
        if number.free_symbols:
            missing = ", ".join(sorted(s.name for s in number.free_symbols))
            raise IRError(f"The size of {missing} is not known where {value} is needed.")
        if number.is_Boolean:
            return bool(number)
        return int(number) if number.is_integer else float(number)
    if isinstance(value, (list, tuple)):
        return type(value)(substitute(item, sizes) for item in value)
    return value


def rewritten(value: Any, known: Mapping[str, Dim]) -> Any:
    """An attribute value, or a shape, with expressions in the place of these dims."""
    if isinstance(value, sympy.Basic) and not symbols_of(value).isdisjoint(known):
        number = value.xreplace({symbol(name): sympy.sympify(d) for name, d in known.items()})
        if not isinstance(number, sympy.Expr):  # a condition
            return bool(number) if number in (sympy.true, sympy.false) else number
        return float(number) if number.is_Float else as_dim(number)
    if isinstance(value, (list, tuple)):
        return type(value)(rewritten(item, known) for item in value)
    return value


class _Printer(PythonPrinter):
    """Names that `parse_dim` reads; torch's own printer calls private functions of torch."""

    def _print_ToFloat(self, expr: sympy.Expr) -> str:
        return f"float({self._print(expr.args[0])})"

    def _print_IntTrueDiv(self, expr: sympy.Expr) -> str:
        return str(self._print_FloatTrueDiv(expr))

    def _print_FloatPow(self, expr: sympy.Expr) -> str:
        base, exponent = (self.parenthesize(arg, PRECEDENCE["Pow"]) for arg in expr.args)
        return f"({base} ** {exponent})"

    def _print_Function(self, expr: sympy.Expr) -> str:
        name = type(expr).__name__.removeprefix("OpaqueUnaryFn_")
        return f"math.{name}({', '.join(map(self._print, expr.args))})"

    _print_OpaqueUnaryFn_sqrt = _print_Function

    def _print_ModularIndexing(self, expr: sympy.Expr) -> str:
        base, divisor, modulus = expr.args
        return str(self._print(torch_sympy.Mod(torch_sympy.FloorDiv(base, divisor), modulus)))


class _Shown(_Printer):
    """For people: `n - n // 2` instead of `n + (-1)*(n // 2)`."""

    def _print_Add(self, expr: sympy.Expr, order: str | None = None) -> str:
        taken = [term for term in expr.args if term.as_coeff_Mul()[0].is_negative]
        added = [term for term in expr.args if term not in taken]
        if not added:
            return str(super()._print_Add(expr, order))
        sums = " + ".join(map(self._term, added))
        return " - ".join([sums, *(self._term(-term) for term in taken)])

    def _term(self, term: sympy.Expr) -> str:
        if term.is_Mul or isinstance(term, torch_sympy.FloorDiv):  # which bind more than a sum
            return str(self._print(term))
        return str(self.parenthesize(term, PRECEDENCE["Add"]))


def shown_dim(dim: Any) -> str:
    """For people; `parse_dim` reads this too."""
    return str(dim) if isinstance(dim, int) else str(_Shown().doprint(dim))


def format_dim(dim: Any) -> str:
    """Python arithmetic; `parse_dim` reads it back."""
    return str(dim) if isinstance(dim, int) else str(_Printer().doprint(dim))


_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Pow: lambda a, b: a**b if a.is_integer and b.is_Integer else torch_sympy.FloatPow(a, b),
    ast.Div: torch_sympy.FloatTrueDiv,
    ast.FloorDiv: torch_sympy.FloorDiv,
    ast.Mod: torch_sympy.Mod,
}
_CALLS: dict[str, Callable[..., Any]] = {
    "max": torch_sympy.Max,
    "min": torch_sympy.Min,
    "float": torch_sympy.ToFloat,
    "round": torch_sympy.RoundToInt,
    "math.trunc": torch_sympy.TruncToInt,
    "math.floor": torch_sympy.FloorToInt,
    "math.ceil": torch_sympy.CeilToInt,
    "abs": sympy.Abs,
}


_LONGEST, _SHOWN = 1 << 14, 200  # characters of an expression, and of one in a message
_BITS, _LARGEST_POWER = 128, 64
UNREADABLE = (ValueError, SyntaxError, ArithmeticError, RecursionError, MemoryError)
"""The errors of reading a text that is no expression, or too deep for Python's parser."""


def parse_dim(text: str) -> Dim:
    """Reads `batch * (seq + 1) // 2` and the like. Raises IRError naming the text, also where to
    work it out would take far more than a size does: a stranger's file may have it.
    """

    def read(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=bool()):
                raise ValueError
            case ast.Constant(value=int(number)) if number.bit_length() <= _BITS:
                return sympy.Integer(number)
            case ast.Constant(value=float(number)):
                return sympy.Float(number)
            case ast.Name(id=name):
                return symbol(name)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -read(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                one, two = read(left), read(right)
                if type(op) is ast.Pow and any(
                    part.is_number and abs(part) > most
                    for part, most in ((one, 1 << _LARGEST_POWER), (two, _LARGEST_POWER))
                ):
                    raise ValueError
                return _BINARY[type(op)](one, two)
            case ast.Call(func=func, args=args):
                name = ast.unparse(func)
                function = _CALLS.get(name) or getattr(
                    torch_sympy, name.replace("math.", "OpaqueUnaryFn_", 1), None
                )
                if function is not None and (name in _CALLS or name.startswith("math.")):
                    return function(*map(read, args))
        raise ValueError

    try:
        return as_dim(read(syntax_of(text)))
    except UNREADABLE as error:
        raise IRError(f"{shortened(text)} is not a dimension expression.") from error


def syntax_of(text: str) -> ast.expr:
    """Raises one of `UNREADABLE`."""
    if len(text) > _LONGEST:
        raise ValueError
    return ast.parse(text.strip(), mode="eval").body


def shortened(text: str) -> str:
    """A text in quotes, for a message, cut where it is long."""
    return repr(text if len(text) < _SHOWN else f"{text[:_SHOWN]}…")


def bounds(dim: Dim, infos: Mapping[str, DimInfo]) -> tuple[int, int | None]:
    """The least and the greatest value of a size (None: unbounded), from the ranges of its dims."""
    if isinstance(dim, int):
        return dim, dim
    found = range_of(dim, infos)
    low = int(found.lower) if found.lower.is_Integer else 0
    return max(low, 0), int(found.upper) if found.upper.is_Integer else None


def at_least(dim: Dim, low: int, infos: Mapping[str, DimInfo]) -> bool:
    """Whether an expression is provably never below a number."""
    return bool(range_of(sympy.sympify(dim), infos).lower >= low)


def range_of(expr: sympy.Expr, infos: Mapping[str, DimInfo]) -> ValueRanges[sympy.Expr]:
    """Bounds of an expression, from the ranges of its dims; those that have none are at least 0."""
    known = {name: infos.get(name, DimInfo(low=0)) for name in symbols_of(expr)}
    ranges = {
        symbol(name): ValueRanges(info.low, int_oo if info.high is None else info.high)
        for name, info in known.items()
    }
    found = bound_sympy(expr, ranges)
    without = without_floors(expr, ranges)
    if without is None:
        return found
    other = bound_sympy(without, ranges)
    if found.is_int and not other.is_int:  # its ends are quotients
        low, high = other.lower, other.upper
        low = sympy.ceiling(low) if low.is_Rational else -int_oo
        high = sympy.floor(high) if high.is_Rational else int_oo
        other = ValueRanges(low, high)
    return found & other


def without_floors(
    expr: sympy.Expr, ranges: dict[sympy.Symbol, ValueRanges[sympy.Expr]]
) -> sympy.Expr | None:
    """A sum with (a − m) / n in the place of each a // n, whose remainder m it adds to the ranges.

    So 4·((3 + s) // 4) − s is 3 − m with m in 0..3, which isn't below 0. None without such a term.
    """
    if not expr.has(torch_sympy.FloorDiv):
        return None
    rest: Any = sympy.Integer(0)
    remainders: dict[sympy.Expr, sympy.Symbol] = {}
    for term in sympy.Add.make_args(sympy.expand(expr)):
        factor, quotient = term.as_coeff_Mul()
        if not isinstance(quotient, torch_sympy.FloorDiv):
            rest += term
            continue
        above, below = quotient.args
        if not (below.is_Integer and below.is_positive and above.is_integer):
            return None
        left = remainders.setdefault(quotient, sympy.Dummy("m", integer=True))
        ranges[left] = ValueRanges(0, below - 1)
        rest += factor * (above - left) / below
    return sympy.expand(rest) if remainders else None
