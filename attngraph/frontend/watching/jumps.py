"""Which way a line of the model's code went, from the bytecode that ran: `if index.numel() == 0:`.

What a condition is made of need not be a tensor: in eager a size is one of Python's integers, and
nothing of ours is called when it is compared. The interpreter tells of each instruction, though.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

_BETWEEN = {"TO_BOOL", "UNARY_NOT", "COPY", "CACHE", "EXTENDED_ARG", "NOP", "NOT_TAKEN"}
"""Instructions that may stand between a condition and its jump."""


def chooses_alone(frame: FrameType) -> bool:
    """Whether the condition that a frame computes just now is the only one of its line."""
    code, line = frame.f_code, frame.f_lineno
    jumps = _jumps(code).get(line, {})
    if len(jumps) != 1 or frame.f_lasti not in next(iter(jumps.values())).asked:
        return False
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return not _is_inner(code) and not any(line in _jumps(each) for each in inner)


def _is_inner(code: CodeType) -> bool:
    """Whether code is that of a lambda or a comprehension, which shares its line with others."""
    return code.co_name.startswith("<")


@contextmanager
def recorded_jumps(found: Mapping[tuple[str, int], set[bool]]) -> Iterator[None]:
    """Within, what the condition of each of these lines was is added to its set.

    Lines with several conditions, or none, are left out.
    """
    files = {file for file, _ in found}
    pending: dict[FrameType, tuple[set[bool], _Jump]] = {}

    def step(frame: FrameType, event: str, _: Any) -> Any:
        if event in ("opcode", "return") and frame in pending:
            sides, jump = pending.pop(frame)
            if event == "opcode":
                sides.add(jump.said(frame.f_lasti))
        if event == "opcode":
            jumps = _jumps(frame.f_code).get(frame.f_lineno, {})
            sides_there = found.get((frame.f_code.co_filename, frame.f_lineno))
            if sides_there is not None and len(jumps) == 1 and frame.f_lasti in jumps:
                pending[frame] = sides_there, jumps[frame.f_lasti]
        return step

    def entered(frame: FrameType, event: str, given: Any) -> Any:
        code = frame.f_code
        if code.co_filename not in files or _is_inner(code):
            return None
        if not any((code.co_filename, line) in found for line in _jumps(code)):
            return None
        frame.f_trace_opcodes = True
        return step(frame, event, given)

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        yield
    finally:
        sys.settrace(before)


class _Jump:
    """A jump of bytecode by a condition: the side on which it falls through to `next`.

    `asked` are the instructions that make a bool of the condition. With `flipped` what is asked is
    the opposite of what the jump goes by.
    """

    def __init__(self, before: list[dis.Instruction], jump: dis.Instruction, next: int) -> None:
        self.next = next
        self.asked = {jump.offset}
        self.falls = "IF_FALSE" in jump.opname
        for instruction in reversed(before):
            if instruction.opname == "UNARY_NOT":
                self.falls = not self.falls
            if instruction.opname not in _BETWEEN:
                if instruction.opname == "COMPARE_OP":  # which makes the bool itself from 3.13 on
                    self.asked.add(instruction.offset)
                break
            self.asked.add(instruction.offset)

    def said(self, offset: int) -> bool:
        """What was asked, if the instruction after the jump is at this offset."""
        return self.falls == (offset == self.next)


@lru_cache(maxsize=256)
def _jumps(code: CodeType) -> dict[int, dict[int, _Jump]]:
    """The jumps by a condition, by line and offset; those by `is None` ask nothing of a value."""
    found: dict[int, dict[int, _Jump]] = {}
    instructions = [each for each in dis.get_instructions(code) if each.opname != "CACHE"]
    line = 0
    for at, instruction in enumerate(instructions):
        position = instruction.positions
        if position is not None and position.lineno is not None:
            line = position.lineno
        name = instruction.opname
        if "JUMP" in name and ("IF_TRUE" in name or "IF_FALSE" in name):
            after = instructions[at + 1].offset
            jump = _Jump(instructions[:at][-4:], instruction, after)
            found.setdefault(line, {})[instruction.offset] = jump
    return found
