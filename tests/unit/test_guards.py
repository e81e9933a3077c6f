"""Which of torch.export's violated guards always hold."""

from __future__ import annotations

import pytest
import sympy

from attngraph.frontend.tracing.guards import always_hold, excluded_largest, excluded_small
from attngraph.ir.conditions import always, at_sizes, holds, parse_condition
from attngraph.ir.dims import DimInfo, symbol

_MESSAGE = """Constraints violated (seq)! For more information, run with TORCH_LOGS="+dynamic".
  - Not all values of seq = {size} in the specified range {range} satisfy the \
generated guard {guard}.

The error above occurred when calling torch.export.export."""
_SIZE = "L['ids'].size()[1]"


def message(guard: str, range_: str = "seq <= 512") -> str:
    filled = guard.replace("S", _SIZE).replace("B", "L['args'][0].size()[0]")
    return _MESSAGE.format(size=_SIZE, range=range_, guard=filled)


@pytest.mark.parametrize(
    "guard",
    [
        "min(S, 4*S) == S",
        "min(16*S, 32*S) == (16*S)",
        "min(6*S, 12*S) != (36*S)",
        "max(1, S) == S",
        "B*S >= S",
        "(S // 2) <= S",
        "min(S, 4*((3 + S) // 4)) == S",
        "(4*((3 + S) // 4)) - S < 4",
        "(((4 + S) // 5) % (5*((4 + S) // 5))) != 0",
    ],
)
def test_what_is_true_of_every_size(guard: str) -> None:
    assert always_hold(message(guard))


@pytest.mark.parametrize(
    ("guard", "range_"),
    [
        ("S <= 128", "seq <= 512"),
        ("S != 64", "2 <= seq <= 4096"),
        ("S != 20", "2 <= seq <= 4096"),
        ("min(6*S, 12*S) != (6*S)", "seq <= 512"),
        ("6*S != B", "seq <= 512"),
        ("S*S != 12*S", "seq <= 512"),
        ("B == S", "seq <= 512"),
        ("(S % 2) == 0", "seq <= 512"),
        ("min(S, 4*((2 + S) // 4)) == S", "seq <= 512"),
        ("min(S, 5*((3 + S) // 4)) == (5*((3 + S) // 4))", "seq <= 512"),
        ("(4*((3 + S) // 4)) - S < 3", "seq <= 512"),
        ("(((4 + S) // 5) % (3 + ((4 + S) // 5))) != 1", "seq <= 512"),
        ("Mod(S, 8) == 0", "seq <= 512"),
        ("__import__('os').getcwd() == S", "seq <= 512"),
    ],
)
def test_what_is_not_or_can_not_be_read(guard: str, range_: str) -> None:
    assert not always_hold(message(guard, range_))


def test_a_dim_without_a_range_is_printed_without_one() -> None:
    said = message("min(8 + 8*S, 16 + 16*S) == (8 + 8*S)", "").replace(
        "range  satisfy", "range satisfy"
    )
    assert always_hold(said)
    assert not always_hold(message("S >= 8", "").replace("range  satisfy", "range satisfy"))


def test_a_range_narrows_what_must_hold() -> None:
    assert always_hold(message("S >= 8", "8 <= seq <= 512"))


def test_what_holds_where_a_suggestion_narrows_a_range() -> None:
    """torch writes the ends that it suggests as one more guard, without a full stop."""
    ends = message("8 <= S and S <= 512").replace("512.", "512")
    said = ends.replace("512\n", "512\n" + message("S >= 7").splitlines()[1] + "\n", 1)
    assert said.count("Not all values of") == 2
    within = {"seq": "8 <= seq <= 512"}
    assert always_hold(said, within)
    assert not always_hold(said)
    assert not always_hold(said, {"seq": "2 <= seq <= 512"})
    assert not always_hold(said.replace("S >= 7", "S >= 9").replace(">= 7", ">= 9"), within)
    assert not always_hold(message("S >= 8", "2 <= seq <= 512"))
    frames = "(1 + (S // 20)*(S // 20) + (-2)*(S // 20)) != 0"
    assert always_hold(message(frames, "60 <= seq"))
    assert not always_hold(message(frames, "20 <= seq"))
    assert not always_hold("some other error")


def test_a_largest_size_that_is_excluded_is_one_less() -> None:
    fixed = ["seq = Dim('seq', max=511)"]
    assert excluded_largest(message("S != 512", "2 <= seq <= 512")) == fixed
    assert excluded_largest(message("512 != S")) == fixed
    assert excluded_largest(message("(20 + 4*S) != 2068", "seq <= 512")) == fixed
    assert excluded_largest(message("4*S != 2048", "2 <= seq <= 512")) == fixed
    for guard in (
        "S != 511",
        "S <= 512",
        "B != S",
        "(20 + 4*S) != 2064",
        "3*S != 2048",
        "S*S != 4",
    ):
        assert excluded_largest(message(guard)) == []


@pytest.mark.parametrize(
    ("told", "low", "follows"),
    [
        ("n // 2 != 1", 2, True),
        ("1 != n // 2", 2, True),
        ("n // 2 != 1", 1, False),  # 0 is not above 1 either
        ("n // 2 != 2", 2, False),
        ("n // 3 != 1", 3, False),
        ("n // 2 <= 1", 2, False),
    ],
)
def test_a_size_above_another_follows_from_no_less_and_another(
    told: str, low: int, follows: bool
) -> None:
    infos = {"n": DimInfo(low, None, 8)}
    for asked in ("max(1, n // 2) > 1", "1 < max(1, n // 2)"):
        found = holds(parse_condition(asked), infos, {parse_condition(told)})
        assert found == follows


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("4 * b * p + 4 * b * s == 4 * b * (p + s)", True),
        ("4 * b * p + 4 * b * s != 4 * b * (p + s)", False),
        ("4 * b * p + 4 * b * s == 4 * b * (p + s) + b - 1", None),
    ],
)
def test_equal_products_are_told_whatever_the_order(told: str, expected: bool | None) -> None:
    infos = {name: DimInfo(0, None, 8) for name in "bps"}
    assert always(parse_condition(told), infos) is expected


@pytest.mark.parametrize(
    ("told", "low", "expected"),
    [
        ("4 * ((n + 3) // 4) >= n", 0, True),
        ("n // 4 >= 1", 4, True),
        ("n // 4 >= 1", 3, None),
        ("4 * (n // 4) > n", 1, False),
        ("n - 8 * (n // 8) < 8", 1, True),
        ("n - 8 * (n // 8) < 7", 1, None),
        ("n // 2 + n // 3 <= n", 0, True),
        ("n // 2 + n // 3 >= n - 1", 0, None),
    ],
)
def test_a_quotient_is_within_its_remainder(told: str, low: int, expected: bool | None) -> None:
    assert always(parse_condition(told), {"n": DimInfo(low, None, 8)}) is expected


@pytest.mark.parametrize(
    ("told", "low", "expected"),
    [
        ("1 + (n // 20) * (n // 20) - 2 * (n // 20) != 0", 40, True),
        ("1 + (n // 20) * (n // 20) - 2 * (n // 20) != 0", 39, None),
        ("n * m - 2 * n - m + 2 == 0", 3, False),
        ("n * m - 2 * n - m + 2 != 0", 2, None),
        ("n * n - n * m == 0", 1, None),
        ("n * n + 1 != 0", 0, True),
    ],
)
def test_a_product_is_zero_where_a_factor_is(told: str, low: int, expected: bool | None) -> None:
    infos = {name: DimInfo(low, None, 80) for name in "nm"}
    assert always(parse_condition(told), infos) is expected


def test_small_sizes_that_are_excluded_are_a_lower_end() -> None:
    samples = {"seq": 400}
    strided = "((-1) + (S // 10)) != 1"
    assert excluded_small(message(strided), samples) == ["seq = Dim('seq', min=30, max=512)"]
    assert excluded_small(message(strided, "2 <= seq"), samples) == ["seq = Dim('seq', min=30)"]
    assert excluded_small(message("((-1) + S) != 1"), samples) == [
        "seq = Dim('seq', min=3, max=512)"
    ]
    assert excluded_small(message("S >= 8"), samples) == ["seq = Dim('seq', min=8, max=512)"]


@pytest.mark.parametrize(
    "guard",
    [
        "(S // 10) != 40",
        "(S % 4) == 0",
        "S != 401",
        "B != S",
        "S <= 8",
        "S != 7",  # 3 is none of these
        "((-1) + 2*S) != 13",
    ],
)
def test_what_excludes_other_sizes_than_small_ones(guard: str) -> None:
    assert excluded_small(message(guard), {"seq": 400}) == []
    assert excluded_small(message("((-1) + (S // 10)) != 1"), {"seq": 25}) == []
    assert excluded_small(message("((-1) + (S // 10)) != 1"), {}) == []


def test_a_remainder_by_less_than_nothing_is_pythons() -> None:
    """Of sizes that other conditions exclude: 9 % (9 - 16) is -5, and 16 % 0 nothing at all."""
    condition = parse_condition("n % (n - 16) == n - 14")
    found = {n: at_sizes(condition, {symbol("n"): sympy.Integer(n)}) for n in (9, 14, 16, 17, 30)}
    assert found == {n: n != 16 and n % (n - 16) == n - 14 for n in found}
    assert found[9] == sympy.true
