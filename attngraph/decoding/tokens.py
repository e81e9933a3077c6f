"""The token ids and masks that a decoder is called with, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attngraph.errors import UsageError
from attngraph.numeric import whole

_IDS = (torch.int64, torch.int32)
_MASKS = (torch.bool, *_IDS)


@dataclass(frozen=True)
class Fed:
    """What a decoder is given in the place of new ids: its inputs by name, and the `shift` of what
    it has then `Seen`."""

    inputs: Mapping[str, torch.Tensor]
    shift: torch.Tensor | None = None


@dataclass(frozen=True)
class Seen:
    """The tokens that a cache holds: `ids` (B, P), and as `shown` (B, P) what the mask was.

    `shown` is None where no token was hidden. `shift` (B, 1) is by how much the next position is
    above the number of tokens, where images lie on grids.
    """

    ids: torch.Tensor
    shown: torch.Tensor | None = None
    shift: torch.Tensor | None = None

    @property
    def counts(self) -> tuple[int, int]:
        """How many tokens there are with padding, and how many positions without it."""
        total = self.ids.shape[1]
        if self.shown is None or total == 0:
            return total, total
        return total, int(self.shown.sum(1).max())

    @classmethod
    def nothing(cls, batch: int) -> Seen:
        """Rows without a token."""
        return cls(torch.empty(batch, 0, dtype=torch.int64))

    def then(self, ids: torch.Tensor, shown: torch.Tensor | None) -> Seen:
        """These tokens and new ones `ids` (B, S), where `shown` (B, P + S) is the mask of all."""
        return Seen(torch.cat([self.ids, ids.to(self.ids.dtype)], 1), shown)

    def upto(self, total: int) -> Seen:
        """The first of these tokens."""
        return Seen(self.ids[:, :total], None if self.shown is None else self.shown[:, :total])

    def require_left(self) -> None:
        """Raises UsageError if a row hides a token behind one that it shows.

        A state has no place that could be hidden: it is without a token only before the first.
        """
        if self.shown is None:
            return
        behind = self.shown.cummax(1).values & ~self.shown
        if bool(behind.any()):
            row, place = _first(behind)
            raise UsageError(
                f"attention_mask is 0 at row {row}, place {place}, behind a token: the model keeps "
                "states, so rows can be padded on the left alone."
            )

    def require_same(self, shown: torch.Tensor | None) -> None:
        """Raises UsageError if a mask differs at the tokens that the cache holds.

        Their keys and positions are those of the mask that they came with.
        """
        held = self.ids.shape[1]
        if held == 0 or (shown is None and self.shown is None):
            return
        if shown is None:
            raise UsageError(
                "The cache holds padding: attention_mask must have the zeros that the cache was "
                "made with, and 1 for each token after them."
            )
        before = torch.ones_like(self.ids, dtype=torch.bool) if self.shown is None else self.shown
        changed = before != shown[:, :held]
        if bool(changed.any()):
            row, place = _first(changed)
            now, then = int(shown[row, place]), int(before[row, place])
            raise UsageError(
                f"attention_mask is {now} at row {row}, place {place}, and was {then} when the "
                "cache was made: what a cache holds can't be hidden or shown afterwards."
            )


def token_ids(ids: Any, vocabulary: int | None) -> torch.Tensor:
    """Token ids (B, S), on the CPU. Raises UsageError for anything else.

    Ids are int64 or int32. Narrower integers are refused, because the ids that `generate` joins to
    them would not fit; so are ids that the model has no row for, `vocabulary` being their number.
    """
    checked = _tensor("ids", ids, _IDS, "token ids")
    if checked.ndim != 2 or 0 in checked.shape:
        raise UsageError(
            f"ids has shape {tuple(checked.shape)}; it must be (batch, length), with a row and a "
            "token at least."
        )
    checked = checked.detach().cpu()
    if vocabulary is not None:
        unknown = (checked < 0) | (checked >= vocabulary)
        if bool(unknown.any()):
            row, place = _first(unknown)
            raise UsageError(
                f"ids has {int(checked[row, place])} at row {row}, place {place}; the model knows "
                f"the ids 0 to {vocabulary - 1}."
            )
    return checked


def token_id(name: str, value: Any, vocabulary: int | None) -> int:
    """One token id. Raises UsageError for anything else."""
    return whole(name, value, 0, None if vocabulary is None else vocabulary - 1)


def end_tokens(value: Any, vocabulary: int | None) -> list[int]:
    """The ids that end a row: one, several, or with None none. Raises UsageError."""
    if value is None:
        return []
    if isinstance(value, torch.Tensor) and value.ndim > 0:
        value = value.flatten().tolist()
    values = value if isinstance(value, (list, tuple, set, frozenset, range)) else [value]
    return [token_id("eos_token_id", each, vocabulary) for each in values]


def shown_tokens(mask: Any, batch: int, held: int, new: int) -> torch.Tensor | None:
    """An attention mask (B, P + S) of zeros and ones as bools on the CPU; None where none is 0.

    `held` are the P tokens in the cache and `new` the S after them. Raises UsageError for another
    dtype than bool, int64 and int32, another shape, and other numbers.
    """
    if mask is None:
        return None
    checked = _tensor("attention_mask", mask, _MASKS, "a mask")
    if tuple(checked.shape) != (batch, held + new):
        given = f"for {held} tokens in the cache and {new} new ones it must be"
        raise UsageError(
            f"attention_mask has shape {tuple(checked.shape)}; {given} {(batch, held + new)}."
        )
    checked = checked.detach().cpu()
    shown = checked != 0
    other = shown & (checked != 1)
    if bool(other.any()):
        row, place = _first(other)
        raise UsageError(
            f"attention_mask has {int(checked[row, place])} at row {row}, place {place}; it must "
            "be 1 where there is a token and 0 where there is padding."
        )
    return None if bool(shown.all()) else shown


def pieces(held: int, total: int, most: int | None) -> list[tuple[int, int]]:
    """(start, stop) of the calls that take the tokens from `held` on to `total`, of `most` each."""
    step = total - held if most is None else most
    return [(start, min(start + step, total)) for start in range(held, total, max(step, 1))]


def positions(shown: torch.Tensor | None, held: int, new: int) -> torch.Tensor:
    """(1 | B, S): how many tokens come before each."""
    if shown is None:
        return torch.arange(held, held + new)[None]
    return (shown.long().cumsum(-1) - 1).clamp_min(0)[:, held:]


def _tensor(name: str, value: Any, dtypes: Collection[torch.dtype], what: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise UsageError(f"{name} must be a torch.Tensor, not {type(value).__name__}.")
    if value.is_meta or value.is_nested or value.layout is not torch.strided:
        raise UsageError(f"{name} must be a dense tensor that holds numbers, on the CPU or a GPU.")
    if value.dtype not in dtypes:
        *names, last = (_short(dtype) for dtype in dtypes)
        raise UsageError(
            f"{name} is {_short(value.dtype)}; {what} must be {', '.join(names)} or {last}."
        )
    return value


def _first(found: torch.Tensor) -> tuple[int, int]:
    row, place = found.nonzero()[0].tolist()
    return int(row), int(place)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
