"""What keeps a size a size, read off the line of Python that made a number of it."""

from __future__ import annotations

import ast
import linecache
import re
import textwrap

_LOOP = re.compile(r"\bfor\b|\brange\(|unbind|\.split\(|\.chunk\(")
_COUNTED_PARTS = re.compile(r"\bchunk\((?:[A-Za-z_][\w.]*, )?(\d+)\b|\bsplit\([^()]*// ?(\d+)\b")
_ONE_BACK = re.compile(r",\s*-1\s*\)")


def advice(file: str, at: int) -> str:
    """What to write there instead. Of a line that is unknown, what holds anywhere."""
    line, loop = linecache.getline(file, at), _loop_at(file, at)
    if loop is not None and _breaks(loop):
        return (
            "run every step there, and in the place of break keep the state as it is: "
            "done = done | condition, and then state = torch.where(done, state, new)"
        )
    if loop is not None and (mask := _left_out(loop)):
        return (
            "read the whole axis in each step there and hide what a slice leaves out, as by "
            f"scores.masked_fill({mask}, -torch.inf), for the slice has another size in each step"
        )
    if _counts_in_steps(line):
        return (
            "take the parts as x.split(step, dim) gives them, and join them by torch.cat, which is "
            "whole in the graph where no part needs another, or, where one does, pad the axis to a "
            "multiple and go through the parts of x.unflatten(dim, (-1, step))"
        )
    if parts := _COUNTED_PARTS.search(line):
        count = parts[1] or parts[2]
        return (
            f"ask for the multiples of {count} alone, as by {count} * Dim('part'), which are cut "
            "into equal parts there"
        )
    if _LOOP.search(line):
        return (
            "compute all steps at once there, with tensors such as torch.arange(size) in place of "
            "a loop, which a trace unrolls"
        )
    return (
        "keep it a size there, as tensor.shape[i] gives it, in arithmetic and arguments of torch's "
        "own functions"
    )


def _loop_at(file: str, at: int) -> ast.For | None:
    """The loop of Python that begins on a line."""
    first = linecache.getline(file, at)
    indent = len(first) - len(first.lstrip())
    lines = [first]
    while (line := linecache.getline(file, at + len(lines))) and (
        not line.strip() or len(line) - len(line.lstrip()) > indent
    ):
        lines.append(line)
    try:
        (loop,) = ast.parse(textwrap.dedent("".join(lines))).body
    except (SyntaxError, ValueError):
        return None
    return loop if isinstance(loop, ast.For) else None


def _breaks(loop: ast.For) -> bool:
    """Whether a `break` leaves this loop, and not one within it."""
    inner = list[ast.AST](loop.body)
    while inner:
        node = inner.pop()
        if isinstance(node, ast.Break):
            return True
        if isinstance(node, ast.For | ast.While):
            inner += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.Lambda):
            inner += ast.iter_child_nodes(node)
    return False


def _left_out(loop: ast.For) -> str:
    """Which places a slice that ends with the step leaves out, `x[:, : t + 1]` in a loop over t, or
    `x[:, :end]` after `end = min(t + 4, n)`; "" where the loop has none.
    """
    if not isinstance(loop.target, ast.Name):
        return ""
    step = loop.target.id
    ends = {step}
    for each in ast.walk(loop):
        match each:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if _names(value) & ends:
                if not any(isinstance(part, ast.Slice) for part in ast.walk(value)):
                    ends.add(name)
    for each in ast.walk(loop):
        match each:
            case ast.Slice(lower=lower, upper=ast.expr() as upper, step=None):
                if _names(upper) & ends and not (lower is not None and _names(lower) & ends):
                    end = ast.unparse(upper)
                    is_next = end == f"{step} + 1"
                    return f"torch.arange(size) {f'> {step}' if is_next else f'>= {end}'}"
    return ""


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _counts_in_steps(line: str) -> bool:
    """Whether a line has a range with a step, as that over the blocks of an axis."""
    _, is_range, rest = line.partition("range(")
    depth = commas = 0
    if _ONE_BACK.search(rest):
        return False
    for sign in rest:
        depth += (sign in "([") - (sign in ")]")
        if depth < 0:
            break
        commas += sign == "," and depth == 0
    return bool(is_range) and commas == 2
