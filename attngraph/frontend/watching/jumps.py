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

from attngraph.frontend.watching.frames import watched_frames

_BETWEEN = {"TO_BOOL", "UNARY_NOT", "COPY", "CACHE", "EXTENDED_ARG", "NOP", "NOT_TAKEN"}
"""Instructions that may stand between a condition and its jump."""
_COMPARES_TO_BOOL = sys.version_info >= (3, 13)
"""Whether a comparison makes the bool itself that its jump goes by."""


def chooses_alone(frame: FrameType) -> bool:
    """Whether the condition that a frame computes just now is the only one of its line."""
    jump = _only_jump(frame.f_code, frame.f_lineno)
    return jump is not None and frame.f_lasti in jump.asked


@contextmanager
def recorded_jumps(found: Mapping[tuple[str, int], set[bool]]) -> Iterator[None]:
    """Within, what the condition of each of these lines was is added to its set.

    Lines with several conditions, or none, are left out.
    """
    if not found:
        yield
        return
    files = {file for file, _ in found}
    pending: dict[FrameType, tuple[set[bool], _Jump]] = {}

    def step(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":  # Python 3.14 forgets what it is told when a frame is entered
            frame.f_trace_opcodes = True
        if event in ("opcode", "return") and frame in pending:
            sides, jump = pending.pop(frame)
            if event == "opcode":
                sides.add(jump.said(frame.f_lasti))
        sides_there = found.get((frame.f_code.co_filename, frame.f_lineno))
        if event == "opcode" and sides_there is not None:
            only = _only_jump(frame.f_code, frame.f_lineno)
            if only is not None and only.offset == frame.f_lasti:
                pending[frame] = sides_there, only
        return step

    def entered(frame: FrameType, event: str, given: Any) -> Any:
        code = frame.f_code
        if code.co_filename not in files:
            return None
        if not any((code.co_filename, line) in found for line in _jumps(code)):
            return None
        frame.f_trace_opcodes = True
        return step(frame, event, given)

    with watched_frames(entered):
        yield


class _Jump:
    """A jump of bytecode, at `offset`, by a condition: the side on which it falls to `next`.

    `asked` are the instructions that make a bool of the condition; a `not` may stand behind them.
    """

    def __init__(self, before: list[dis.Instruction], jump: dis.Instruction, next: int) -> None:
        self.offset, self.next = jump.offset, next
        self.asked = {jump.offset}
        self.falls = "IF_FALSE" in jump.opname
        for instruction in reversed(before):
            if instruction.opname == "UNARY_NOT":
                self.falls = not self.falls
            if instruction.opname not in _BETWEEN:
                if instruction.opname == "COMPARE_OP" and _COMPARES_TO_BOOL:
                    self.asked.add(instruction.offset)
                break
            self.asked.add(instruction.offset)

    def said(self, offset: int) -> bool:
        """What was asked, if the instruction after the jump is at this offset."""
        return self.falls == (offset == self.next)


def _only_jump(code: CodeType, line: int) -> _Jump | None:
    """The jump by a condition of a line that has no other, in lambdas and lists neither."""
    jumps = [*_jumps(code).get(line, {}).values()]
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    is_inner = code.co_name.startswith("<")  # shares its line with the code around it
    if len(jumps) != 1 or is_inner or any(line in _jumps(each) for each in inner):
        return None
    return jumps[0]


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
