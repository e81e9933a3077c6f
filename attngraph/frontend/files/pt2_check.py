"""Finds what could run code, when it is loaded or called, in the JSON of a `.pt2` file.

torch's deserialiser evaluates size expressions, pastes names and guards into generated Python, and
resolves operators by attribute lookup from `torch`. Each of these is held against an allowlist
here, and its cost against a bound. A filter is not a proof: it covers the ways in that we know of
torch 2.11 to 2.13.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree

from attngraph.frontend.files.expressions import (
    IDENTIFIER,
    QUALIFIED_NAME,
    is_plain_guard,
    is_plain_name,
    is_plain_size,
    size_cost,
)

_OPERATOR = re.compile(r"torch\.ops\.(aten|prims)\.(\w+)\.(\w+)\Z")
_TORCH_SYMBOLIC = re.compile(r"torch\.(sym_|_sym_)[a-z_]+\Z")
_PYTHON_OPERATORS = frozenset(
    [
        "add",
        "sub",
        "mul",
        "floordiv",
        "truediv",
        "mod",
        "pow",
        "neg",
        "pos",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "and_",
        "or_",
        "not_",
        "lshift",
        "rshift",
        "getitem",
    ]
)
_MATH = frozenset(["trunc", "ceil", "floor", "sqrt", "log", "exp"])
_HIGHER_ORDER = frozenset(
    [
        "cond",
        "map_impl",
        "while_loop",
        "scan",
        "associative_scan",
        "flex_attention",
        "wrap_with_set_grad_enabled",
        "wrap_with_autocast",
    ]
)
_TOUCHES_FILES = frozenset(("from_file", "save", "load"))

_CONTAINERS = frozenset(
    (
        "builtins.dict", "builtins.list", "builtins.tuple", "collections.OrderedDict",
        "collections.deque", "torch.Size", "torch.fx.immutable_collections.immutable_dict",
        "torch.fx.immutable_collections.immutable_list",
    )
)  # fmt: skip
_IMPORTS_BY_NAME = "collections.defaultdict"
"""Its treespec names a module that torch imports."""

_LARGEST_JSON = 64 << 20
_MOST_ENTRIES = 3_000_000
_DIGITS = 20
_MOST_GUARDS = 5_000
_LONGEST_GUARDS = 1 << 18
_SHORT_SIZE = 100
_MOST_SIZE_NODES = 100_000
"""Nodes of all sizes that have more than `_SHORT_SIZE` each."""
_LONGEST_LIST = 50_000
"""Items of an argument of an operator, such as a shape or a list of tensors."""
_MOST_TENSORS = 50_000
"""Names of stored tensors, each of which may be a view of the same bytes."""
_REPEATED = 1 << 20
"""Elements that a tensor may have beyond those that are stored."""

_IDENTIFIER_KEYS = frozenset(("name", "as_name"))
_QUALIFIED_KEYS = frozenset(
    ["fqn", "parameter_name", "buffer_name", "tensor_constant_name", "user_input_name", "class_fqn"]
)
_NAMED_TABLES = frozenset(
    ["tensor_values", "sym_int_values", "sym_bool_values", "sym_float_values", "range_constraints"]
)


def parse_json(data: bytes, member: str) -> Any:
    """The JSON of a member; raises ValueError where it would take far more memory than a graph."""
    if len(data) > _LARGEST_JSON:
        raise ValueError(f"{member} is {len(data)} bytes long")
    entries = sum(map(data.count, (b",", b"[", b"{")))
    if entries > _MOST_ENTRIES:
        raise ValueError(f"{member} has {entries} entries")
    return json.loads(data.decode(), parse_int=_integer)


def _integer(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"a number has {len(text)} digits")
    return int(text)


def program_problems(program: dict[str, Any]) -> Iterator[str]:
    """What is not plain data in `models/NAME.json`, one phrase each."""
    yield from _walk(program)
    yield from _volume_problems(program)
    for verifier in program.get("verifiers") or ():
        if verifier not in ("", "ATEN", "TRAINING"):
            yield f"the verifier {verifier!r}"


def _volume_problems(program: dict[str, Any]) -> Iterator[str]:
    """What is plain, and too much of it to be evaluated."""
    guards = [str(guard) for guard in _items(program.get("guards_code"))]
    if len(guards) > _MOST_GUARDS or sum(map(len, guards)) > _LONGEST_GUARDS:
        yield f"{len(guards)} guards of {sum(map(len, guards))} characters"
    nodes = 0
    queue: list[dict[str, Any] | list[Any]] = [program]
    while queue:
        found = queue.pop()
        for key, value in found.items() if isinstance(found, dict) else enumerate(found):
            if isinstance(value, dict | list):
                queue.append(value)
                if str(key).startswith("as_") and len(value) > _LONGEST_LIST:
                    yield f"an argument of {len(value)} items"
            elif key == "expr_str":
                count = size_cost(str(value)) or 0
                nodes += count if count > _SHORT_SIZE else 0
    if nodes > _MOST_SIZE_NODES:
        yield f"size expressions of {nodes} nodes"


def payload_problems(
    config: dict[str, Any], member: str, prefix: str, stored: Mapping[str, int]
) -> Iterator[str]:
    """What is not a raw tensor in the table `member`, whose payloads are named `prefix`N.

    `stored` are the payloads' bytes: a tensor may repeat what is stored, but not without end.
    """
    tensors = config.get("config", {})
    if len(tensors) > _MOST_TENSORS:
        yield f"a table of {len(tensors)} tensors, {member}"
        return
    for name, payload in tensors.items():
        path = str(payload.get("path_name"))
        if QUALIFIED_NAME.match(name) is None:
            yield f"the tensor name {name!r} in {member}"
        elif payload.get("use_pickle") or payload.get("tensor_meta") is None:
            yield f"the pickled payload {path} of {name!r}"
        elif re.match(re.escape(prefix) + r"\d+\Z", path) is None:
            yield f"the payload {path!r} of {name!r}, which is not a raw tensor"
        else:
            sizes = [size.get("as_int", 0) for size in payload["tensor_meta"]["sizes"]]
            elements, there = math.prod(sizes), stored.get(path, 0)
            if elements > max(there, _REPEATED):
                yield f"the tensor {name!r} of {elements} elements in {there} bytes"


def _walk(value: object) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _walk(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key == "name" and "arg" in value:  # an operator's own, which may be a keyword
                if item not in (None, "") and IDENTIFIER.match(str(item)) is None:
                    yield f"the name {_short(item)}"
            elif key != "metadata":  # source locations: stored as text, never evaluated
                yield from _check_entry(key, item)


def _check_entry(key: str, value: object) -> Iterator[str]:
    if key in ("as_custom_obj", "custom_obj", "custom_obj_values"):
        if value:
            yield "a custom object"
    elif key == "expr_str":
        if not is_plain_size(str(value)):
            yield f"the size expression {_short(value)}"
    elif key == "guards_code":
        yield from (
            f"the guard {_short(guard)}"
            for guard in _items(value)
            if not is_plain_guard(str(guard))
        )
    elif key in ("target", "as_operator"):
        if not _is_plain_operator(str(value)):
            yield f"the operator {_short(value)}"
    elif key in ("in_spec", "out_spec"):
        yield from _treespec_problems(str(value))
        if key == "in_spec":
            names = _keyword_names(str(value))
            yield from (f"the name {_short(name)}" for name in names if not is_plain_name(name))
    elif key in _IDENTIFIER_KEYS or key in _QUALIFIED_KEYS:
        plain = is_plain_name if key in _IDENTIFIER_KEYS else QUALIFIED_NAME.match
        if value not in (None, "") and not plain(str(value)):
            yield f"the name {_short(value)}"
    elif key == "forward_arg_names":
        yield from (f"the name {_short(n)}" for n in _items(value) if not is_plain_name(str(n)))
    else:
        if key in _NAMED_TABLES and isinstance(value, dict):
            yield from (f"the name {_short(name)}" for name in value if not is_plain_name(name))
        yield from _check_table(key, value)


def _check_table(key: str, value: object) -> Iterator[str]:
    """Descend; a table's own keys are names a user chose, so they carry no meaning of their own."""
    if key in _NAMED_TABLES and isinstance(value, dict):
        for item in value.values():
            yield from _walk(item)
    else:
        yield from _walk(value)


def _items(value: object) -> list[object]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _is_plain_operator(target: str) -> bool:
    """Whether a node's target is a tensor or size operator without effects on files."""
    if match := _OPERATOR.match(target):
        namespace, name, overload = match.groups()
        suffix = "" if overload == "default" else f".{overload}"
        # Only dispatcher kernels: TorchScript's own `aten` operators (save, …) are no tensor code.
        return name not in _TOUCHES_FILES and torch._C._dispatch_has_kernel(
            f"{namespace}::{name}{suffix}"
        )
    owner, _, name = target.rpartition(".")
    return (
        (owner == "_operator" and name in _PYTHON_OPERATORS)
        or (owner == "math" and name in _MATH)
        or (owner == "torch.ops.higher_order" and name in _HIGHER_ORDER)
        or _TORCH_SYMBOLIC.match(target) is not None
    )


def _treespec_problems(text: str) -> Iterator[str]:
    if not text:
        return
    try:
        _, spec = json.loads(text)
    except (ValueError, TypeError):
        yield f"the tree {_short(text)}"
        return
    yield from _tree_problems(spec)


def _keyword_names(text: str) -> list[str]:
    """The keyword arguments of a call, whose tree is that of (args, kwargs)."""
    try:
        names = json.loads(json.loads(text)[1]["children_spec"][1]["context"])
    except (ValueError, TypeError, LookupError):
        return []
    return list(map(str, _items(names)))


def _tree_problems(spec: object) -> Iterator[str]:
    if not isinstance(spec, dict):
        yield f"the tree {_short(spec)}"
        return
    kind, context = spec.get("type"), spec.get("context")
    if kind is not None and not _is_known_container(str(kind)):
        yield f"the container type {_short(kind)}, which is not registered with torch"
    if "__enum__" in str(context):
        yield f"the enum {_short(context)}, which names a module to import"
    elif kind == "builtins.dict":
        # Its keys become parameter names of a generated forward.
        yield from (
            f"the key {_short(key)}" for key in _context_keys(context) if not _is_plain_key(key)
        )
    for child in spec.get("children_spec") or ():
        yield from _tree_problems(child)


def _is_known_container(kind: str) -> bool:
    return kind in _CONTAINERS or (
        kind != _IMPORTS_BY_NAME and kind in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE
    )


def _context_keys(context: object) -> list[object]:
    try:
        return _items(json.loads(str(context)))
    except ValueError:
        return [context]


def _is_plain_key(key: object) -> bool:
    return isinstance(key, int) or (isinstance(key, str) and QUALIFIED_NAME.match(key) is not None)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
