"""What a model's generation config says of the next token: forced, suppressed, made less likely."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch

from attngraph.errors import UsageError
from attngraph.frontend.families.described import Described, frozen

_IGNORED = {
    "sequence_bias": None,
    "guidance_scale": (None, 1, 1.0),
    "encoder_repetition_penalty": (None, 1.0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "exponential_decay_length_penalty": None,
    "num_beams": (None, 1),
    "watermarking_config": None,
    "renormalize_logits": (None, False, True),
    "penalty_alpha": (None, 0, 0.0),
    "dola_layers": None,
    "constraints": None,
    "force_words_ids": None,
    "forced_decoder_ids": None,
    "num_return_sequences": (None, 1),
    "stop_strings": None,
    "max_time": None,
}
"""Fields of a generation config that change tokens and that `Rules` lack, and what means no."""
_OF_DRAWING = {
    "min_p": (None, 0, 0.0),
    "top_h": None,
    "typical_p": (None, 1, 1.0),
    "epsilon_cutoff": (None, 0, 0.0),
    "eta_cutoff": (None, 0, 0.0),
}
"""Settings that leave out tokens where one is drawn, and nothing where the likeliest is taken.
"""
_DRAWN = {"temperature": (1.0, None), "top_k": (50, 0), "top_p": (1.0, 1.0)}
"""What `generate` takes of them: transformers' default, and what means no."""


@dataclass(frozen=True)
class Rules(Described):
    """How tokens are chosen, beside the model's logits; fields are those of transformers' config.

    `start` are the tokens that the decoder begins with, where the caller gives none. Of rules that
    come together, the order is that of transformers' generate.
    """

    start: tuple[int, ...] = ()
    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: tuple[int, ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    no_repeat_ngram_size: int = 0
    repetition_penalty: float = 1.0
    min_length: int = 0
    min_new_tokens: int = 0
    left_out: tuple[str, ...] = ()
    """Settings of the config that change tokens and that none of these stands for."""
    drawn: tuple[str, ...] = ()
    """What `generate` is to be given to draw tokens as the config says; nothing if it doesn't."""

    key: ClassVar[str] = "attngraph.rules"
    unlike: ClassVar[str] = "how its tokens are chosen"

    @classmethod
    def of_config(cls, config: Any) -> Rules:
        """The rules of transformers' generation config."""
        found = {}
        for field in fields(cls):
            value = getattr(config, field.name, None)
            if value is None:
                continue
            several = field.name in ("eos_token_id", "forced_eos_token_id")
            found[field.name] = frozen([value] if several and isinstance(value, int) else value)
        start = getattr(config, "decoder_start_token_id", None)
        start = getattr(config, "bos_token_id", None) if start is None else start
        return replace(
            cls(**found),
            start=() if start is None else (int(_first(start)),),
            left_out=tuple(_left_out(config)),
            drawn=tuple(_drawn(config)),
        )

    def known(self, vocabulary: int | None) -> Rules:
        """Without the tokens that end or fill a row, or that are suppressed, of which a model of so
        many has none, as tokenizers have padding of their own.

        Raises UsageError where a token is forced that it lacks.
        """
        most = float("inf") if vocabulary is None else vocabulary

        def had(tokens: Sequence[int]) -> tuple[int, ...]:
            return tuple(token for token in tokens if 0 <= token < most)

        bos, eos = self.forced_bos_token_id, self.forced_eos_token_id
        for name, tokens in (("bos", () if bos is None else (bos,)), ("eos", eos)):
            if had(tokens) != tokens:
                raise UsageError(
                    f"The generation config says forced_{name}_token_id = {list(tokens)}, and the "
                    f"model knows the ids 0 to {most - 1} alone: write one of them into "
                    "generation_config.json, or null, and compile again."
                )
        pad = self.pad_token_id
        return replace(
            self,
            eos_token_id=had(self.eos_token_id),
            pad_token_id=None if pad is None or not had([pad]) else pad,
            suppress_tokens=had(self.suppress_tokens),
            begin_suppress_tokens=had(self.begin_suppress_tokens),
            bad_words_ids=tuple(word for word in self.bad_words_ids if had(word) == word),
        )

    def applied(
        self, logits: torch.Tensor, ids: torch.Tensor, step: int, count: int, ends: Sequence[int]
    ) -> torch.Tensor:
        """The logits (B, V) of the token behind ids (B, S), the `step`-th of `count` new ones.

        Tokens that can't be chosen are −∞. `ends` are the tokens that end a row.
        """
        length, scores = ids.shape[1], logits
        if self.repetition_penalty != 1.0:
            seen = scores.gather(1, ids)
            less = torch.where(
                seen < 0, seen * self.repetition_penalty, seen / self.repetition_penalty
            )
            scores = scores.scatter(1, ids, less)
        hidden = torch.zeros_like(scores, dtype=torch.bool)
        size = self.no_repeat_ngram_size
        if 0 < size <= length:
            windows = ids.unfold(1, size, 1)
            again = (windows[..., :-1] == ids[:, None, length + 1 - size :]).all(-1)
            rows, places = again.nonzero(as_tuple=True)
            hidden[rows, windows[rows, places, -1]] = True
        for *before, last in self.bad_words_ids:
            if len(before) <= length and (before or last not in ends):
                tail = ids[:, length - len(before) :]
                hidden[(tail == torch.tensor(before, dtype=ids.dtype)).all(1), last] = True
        if ends and (length < self.min_length or step < self.min_new_tokens):
            hidden[:, list(ends)] = True
        scores = scores.masked_fill(hidden, -torch.inf)
        if length == 1 and self.forced_bos_token_id is not None:
            scores = _only(scores, [self.forced_bos_token_id])
        if self.forced_eos_token_id and step == count - 1:
            scores = _only(scores, self.forced_eos_token_id)
        begins_later = length - step == 1 and self.forced_bos_token_id is not None
        late = self.begin_suppress_tokens if step == int(begins_later) else ()
        if suppressed := [*self.suppress_tokens, *late]:
            scores = scores.index_fill(1, torch.tensor(suppressed), -torch.inf)
        return scores

    @property
    def notes(self) -> list[str]:
        """What `generate` does otherwise than the config says."""
        told = [
            f"The generation config sets {setting}, of which `generate` takes no notice."
            for setting in self.left_out
        ]
        if self.drawn:
            told.append(
                "The generation config has tokens drawn at random (do_sample), and `generate` "
                f"takes the likeliest unless it is told otherwise: {', '.join(self.drawn)}."
            )
        return told


def _left_out(config: Any) -> Iterator[str]:
    fields = _IGNORED | (_OF_DRAWING if _is_drawn(config) else {})
    for name, none in fields.items():
        value = getattr(config, name, None)
        if value not in (none or (None,)):
            yield f"{name} = {value}"


def _is_drawn(config: Any) -> bool:
    return getattr(config, "do_sample", None) is True


def _drawn(config: Any) -> Iterator[str]:
    for name, (default, none) in _DRAWN.items() if _is_drawn(config) else ():
        value = getattr(config, name, None)
        value = default if value is None else value
        if value != none:
            yield f"{name}={value}"


def _only(scores: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    forced = torch.full_like(scores, -torch.inf)
    forced[:, list(tokens)] = 0
    return forced


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, (list, tuple)) else value


NO_RULES = Rules()
