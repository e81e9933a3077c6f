"""Programs whose graph, names or tensors would cost far more than the file, or break torch's code.

Each change takes the JSON of `models/model.json` and returns it, as an object or as bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Program = dict[str, Any]
Change = Callable[[Program], Program | bytes]

S = "Symbol('s27', positive=True, integer=True)"
SYMBOLS = [f"Symbol('s{n}', positive=True, integer=True)" for n in range(40)]
LENGTH = "L['ids'].size()[0]"
TRILLION = 10**12


def size(text: str) -> Change:
    def change(program: Program) -> Program:
        values = program["graph_module"]["graph"]["tensor_values"]
        values["ids"]["sizes"][0]["as_expr"]["expr_str"] = text
        return program

    return change


def guard(*texts: str) -> Change:
    return lambda program: {**program, "guards_code": list(texts)}


def called(name: str) -> Change:
    """The input `ids` under another name, wherever it stands."""

    def change(program: Program) -> bytes:
        text = json.dumps(program)
        for before, after in (('"{}"', '"{}"'), ("L['{}']", "L['{}']"), ('\\"{}\\"', '\\"{}\\"')):
            text = text.replace(before.format("ids"), after.format(name))
        return text.encode()

    return change


def keyword(name: str) -> Change:
    """The keyword argument `mask` under another name, in the tree of the inputs alone."""

    def change(program: Program) -> Program:
        signature = program["graph_module"]["module_call_graph"][0]["signature"]
        assert "mask" in signature["in_spec"]
        signature["in_spec"] = signature["in_spec"].replace("mask", name)
        return program

    return change


def parameter(name: str) -> Change:
    def change(program: Program) -> Program:
        signature = program["graph_module"]["module_call_graph"][0]["signature"]
        signature["forward_arg_names"] = [name, "mask"]
        return program

    return change


def operand(name: str) -> Change:
    """A keyword argument of an operator that Python can't spell."""

    def change(program: Program) -> Program:
        program["graph_module"]["graph"]["nodes"][0]["inputs"][1].update({"name": name, "kind": 2})
        return program

    return change


def tree(text: str) -> Change:
    def change(program: Program) -> Program:
        program["graph_module"]["module_call_graph"][0]["signature"]["in_spec"] = text
        return program

    return change


def number(text: str) -> Change:
    """A number of the graph, written out."""

    def change(program: Program) -> bytes:
        return json.dumps(program).replace('"as_float": 1e-05', f'"as_float": {text}').encode()

    return change


def lookup(program: Program) -> Program:
    """A node that reads a value that there isn't."""
    program["graph_module"]["graph"]["nodes"][0]["inputs"][0]["arg"]["as_tensor"]["name"] = "none"
    return program


def long_argument(program: Program) -> Program:
    """A shape of a million dims."""
    program["graph_module"]["graph"]["nodes"][1]["inputs"][1]["arg"] = {"as_ints": [4] * 1_000_000}
    return program


def many_sizes(program: Program) -> Program:
    """A thousand sizes, each of which is just small enough."""
    text = f"Add({', '.join(SYMBOLS)})"
    values = program["graph_module"]["graph"]["tensor_values"]
    for at in range(1_000):
        values[f"more{at}"] = json.loads(json.dumps(values["ids"]))
        values[f"more{at}"]["sizes"][0]["as_expr"]["expr_str"] = text
    return program


SIZE, GUARD, NAME, DAMAGED = "size expression", "the guard", "the name", "can't be read as a torch"

PROGRAMS: dict[str, tuple[Change, str]] = {
    "size: tower": (size("9**9**9**9"), SIZE),
    "size: tower of calls": (size("Pow(Integer(9), Pow(Integer(9), Pow(9, 9)))"), SIZE),
    "size: powers of powers": (size("Pow(Pow(Pow(Integer(9), 60), 60), 60)"), SIZE),
    "size: symbol as exponent": (size(f"Pow(Integer(2), {S})"), SIZE),
    "size: natural power": (size(f"PowByNatural({S}, {S})"), SIZE),
    "size: huge rational exponent": (size(f"Pow({S}, Rational({10**15}, 1))"), SIZE),
    "size: shift": (size("1 << 10**12"), SIZE),
    "size: shift by call": (size(f"LShift(Integer(1), Integer({TRILLION}))"), SIZE),
    "size: shifts of shifts": (size("((1 << 60) << 60)" + " << 60" * 90), SIZE),
    "size: digits": (size(f"Integer({'9' * 4000})"), SIZE),
    "size: more digits": (size(f"Integer({'9' * 9000})"), SIZE),
    "size: float exponent": (size("Float('1e1000000000')"), SIZE),
    "size: float digits": (size(f"Float('1.{'1' * 10_000}')"), SIZE),
    "size: precision": (size("Float(1.5, precision=1000000000)"), SIZE),
    "size: decimals": (size(f"RoundDecimal(ToFloat({S}), {TRILLION})"), SIZE),
    "size: maximum of 200,000": (
        size(f"Max({', '.join(f'Integer({n})' for n in range(200_000))})"),
        SIZE,
    ),
    "size: maximum of 40": (size(f"Max({', '.join(SYMBOLS)})"), SIZE),
    "size: nested maxima": (size("Max(1, " * 60 + S + ")" * 60), SIZE),
    "size: product of sums": (size("*".join(f"(s{n} + 1)" for n in range(40))), SIZE),
    "size: power of a sum": (size(f"Pow(Add({', '.join(SYMBOLS[:10])}), Integer(20))"), SIZE),
    "size: deep": (size("FloorDiv(" * 150 + S + ", Integer(2))" * 150), SIZE),
    "size: parentheses": (size("(" * 5_000 + "s1" + ")" * 5_000), SIZE),
    "size: signs": (size("-" * 10_000 + "s1"), SIZE),
    "size: long": (size("+".join(["s1"] * 500_000)), SIZE),
    # Python 3.14 can't walk a sum of so many terms
    "size: wide": (size("+".join(["s1"] * 3_000)), f"{SIZE}|nested too deeply"),
    "size: conditions": (size(" and ".join(["s1 < s2"] * 300)), SIZE),
    "size: text": (size("'a' * 10**12"), SIZE),
    "size: text in a symbol": (size("Symbol('a' * 10**12)"), SIZE),
    "size: list": (size("[0] * 10**12"), SIZE),
    "sizes: many": (many_sizes, r"size expressions of \d{6} nodes"),
    "argument: long": (long_argument, "an argument of 1000000 items"),
    "guard: text": (guard("'a' * 10**12"), GUARD),
    "guard: compared text": (guard(f"{LENGTH} == 'a' * 10**12"), GUARD),
    "guard: tower": (guard(f"{LENGTH} < 9**9**9**9"), GUARD),
    "guard: exponent": (guard(f"2 ** {LENGTH} ** 9 > 0"), GUARD),
    "guard: shift": (guard("1 << 10**12 > 0"), GUARD),
    "guard: maximum": (guard(f"Max({', '.join(map(str, range(3_000)))}) > 0"), GUARD),
    "guard: long": (guard(" and ".join([f"{LENGTH} > 1"] * 50_000)), GUARD),
    "guard: deep": (guard("(" * 3_000 + "1" + ")" * 3_000), GUARD),
    "guard: bytes": (guard("b'a' * 10**12 == 0"), GUARD),
    "guard: lambda": (guard("(lambda: 1)()"), GUARD),
    "guard: comprehension": (guard("[1 for x in range(10**12)]"), GUARD),
    "guard: walrus": (guard(f"(torch := {LENGTH}) > 1"), GUARD),
    "guard: f-string": (guard("f'{1:1000000000}' == 'a'"), GUARD),
    "guard: attribute": (guard("L['ids'].__class__.__init__ == 1"), GUARD),
    "guards: many": (guard(*[f"{LENGTH} >= 2"] * 6_000), "6000 guards"),
    "name: class": (called("class"), NAME),
    "name: lambda": (called("lambda"), NAME),
    "name: None": (called("None"), NAME),
    "name: debug": (called("__debug__"), NAME),
    "name: self": (called("self"), NAME),
    "name: torch": (called("torch"), NAME),
    "name: pytree": (called("pytree"), NAME),
    "name: fx_pytree": (called("fx_pytree"), NAME),
    "name: Kelvin": (called("\u212aelvin"), NAME),
    "name: long": (called("a" * 100_000), NAME),
    "keyword: import": (keyword("import"), NAME),
    "keyword: code": (keyword("m=print()"), NAME),
    "parameter: class": (parameter("class"), NAME),
    "operand: class": (operand("class"), DAMAGED),
    "operand: code": (operand("a=print()"), NAME),
    "tree: deep": (
        tree('[1, {"type": "builtins.list", "context": "null", "children_spec": ['.join(["", ""])),
        "the tree",
    ),
    "tree: nested": (
        tree(
            "[1, "
            + '{"type": "builtins.list", "context": "null", "children_spec": [' * 3_000
            + "]}" * 3_000
            + "]"
        ),
        "nested too deeply",
    ),
    "json: nested": (lambda _: b"[" * 1_000_000, "nested too deeply"),
    "json: entries": (
        lambda _: b"[" + b"[]," * 3_000_000 + b"[]]",
        "model.json has 6000002 entries",
    ),
    "json: cut": (lambda program: json.dumps(program).encode()[:-50], DAMAGED),
    "json: no text": (lambda _: b"\xff\xfe" * 100, DAMAGED),
    "json: a list": (lambda _: b"[]", DAMAGED),
    "json: digits": (number("9" * 1_000_000), "a number has 1000000 digits"),
    "json: many digits": (number("9" * 40), "a number has 40 digits"),
    "json: lost value": (lookup, DAMAGED),
}


def _weight(**changes: Any) -> Change:
    def change(config: Program) -> Program:
        config["config"]["norm.weight"].update(changes)
        return config

    return change


def _meta(**changes: Any) -> Change:
    def change(config: Program) -> Program:
        config["config"]["norm.weight"]["tensor_meta"].update(changes)
        return config

    return change


def _ints(*values: int) -> list[dict[str, int]]:
    return [{"as_int": value} for value in values]


def _aliases(config: Program) -> Program:
    """A hundred thousand tensors, all of them one weight."""
    weight = config["config"]["norm.weight"]
    config["config"].update({f"more{at}": weight for at in range(100_000)})
    return config


WEIGHTS: dict[str, tuple[Change, str]] = {
    "weight: one element a trillion times": (
        _meta(sizes=_ints(TRILLION), strides=_ints(0)),
        "of 1000000000000 elements in 16 bytes",
    ),
    "weight: beyond its bytes": (_meta(sizes=_ints(1_000), strides=_ints(1)), DAMAGED),
    "weight: offset": (_meta(storage_offset={"as_int": 1 << 40}), DAMAGED),
    "weight: negative": (_meta(sizes=_ints(-4)), DAMAGED),
    "weight: strides": (_meta(strides=_ints(1, 1)), DAMAGED),
    "weight: 100,000 names": (_aliases, r"a table of 10000\d tensors"),
    "weight: path": (_weight(path_name="../../../etc/passwd"), "the payload"),
    "weight: absolute": (_weight(path_name="/etc/passwd"), "the payload"),
    "weight: missing": (_weight(path_name="weight_999"), DAMAGED),
    "weight: kind": (_meta(dtype=10**9), DAMAGED),
}
