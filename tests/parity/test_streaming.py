"""Tokens as they are drawn, and conversations that go on from a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attngraph.errors import UsageError
from attngraph.options import CacheKind
from tests.models.kit import VOCABULARY
from tests.parity.test_decode import PROMPT, prompts
from tests.parity.test_runtime_names import ROOM, compiled


class Counted:
    """A decoder whose steps are counted, with the number of new tokens in each."""

    def __init__(self, cache: CacheKind, monkeypatch: pytest.MonkeyPatch) -> None:
        self.decoder = compiled(cache)[1]
        self.fed: list[int] = []
        compute = self.decoder._compute

        def counted(ids: torch.Tensor, *rest: Any) -> Any:
            self.fed.append(ids.shape[1])
            return compute(ids, *rest)

        monkeypatch.setattr(self.decoder, "_compute", counted)


@pytest.mark.parametrize("cache", ["growing", "static"])
def test_each_token_comes_as_it_is_drawn(cache: CacheKind, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(cache, monkeypatch)
    ids, mask = prompts(3)
    expected = counted.decoder.generate(ids, 6, mask)
    counted.fed.clear()
    stream = counted.decoder.stream(ids, 6, mask)
    assert counted.fed == []
    for place, token in enumerate(stream, PROMPT):
        assert torch.equal(token, expected[:, place])
        assert len(counted.fed) == place - PROMPT + 1
        assert stream.cache is not None
        assert stream.cache.length == place
    assert torch.equal(stream.ids, expected)
    assert next(stream, None) is None


@pytest.mark.parametrize("cache", ["growing", "static"])
def test_a_conversation_computes_what_is_new(
    cache: CacheKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rows padded differently, with several new tokens behind the past of each."""
    counted = Counted(cache, monkeypatch)
    ids, mask = prompts(3)
    stream = counted.decoder.stream(ids, 3, mask)
    assert len(list(stream)) == 3
    assert stream.attention_mask is not None
    asked = torch.cat([stream.ids, ids[:, -2:]], 1)
    shown = torch.cat([stream.attention_mask.long(), mask.new_ones(3, 2)], 1)
    expected = counted.decoder.generate(asked, 3, shown)
    again = counted.decoder.stream(ids, 3, mask)
    collected = list(again)
    counted.fed.clear()
    found = counted.decoder.generate(asked, 3, shown, cache=again.cache)
    assert len(collected) == 3
    assert torch.equal(found, expected)
    assert counted.fed == [3, 1, 1]  # the token that was drawn last, and the two new ones


def test_rows_that_have_ended_are_filled_and_the_stream_ends_with_the_last() -> None:
    decoder = compiled("growing")[1]
    ids, mask = prompts(2)
    tokens = decoder.generate(ids, 8, mask)[:, PROMPT:]
    ends = [int(tokens[0, 1]), int(tokens[1, 3])]
    expected = decoder.generate(ids, 8, mask, eos_token_id=ends, pad_token_id=0)
    stream = decoder.stream(ids, 8, mask, eos_token_id=ends, pad_token_id=0)
    assert torch.equal(torch.stack(list(stream), 1), expected[:, PROMPT:])
    assert expected.shape[1] < PROMPT + 8
    assert expected[0, -1] == 0


def test_a_cache_of_other_ids_is_refused_before_anything_is_computed() -> None:
    decoder = compiled("growing")[1]
    ids, _ = prompts(1)
    _, cache = decoder(ids)
    for given, message in (
        (ids, f"holds {PROMPT} tokens and ids has {PROMPT}"),
        (torch.cat([(ids + 1) % VOCABULARY, ids[:, :1]], 1), "don't begin with the tokens"),
    ):
        with pytest.raises(UsageError, match=message):
            decoder.stream(given, 2, cache=cache)
    hidden = torch.ones(1, PROMPT + 1, dtype=torch.long)
    hidden[0, 0] = 0
    with pytest.raises(UsageError, match="can't be hidden or shown afterwards"):
        decoder.stream(torch.cat([ids, ids[:, :1]], 1), 2, hidden, cache=cache)
    with pytest.raises(UsageError, match="room for"):
        compiled("static")[1].stream(ids, ROOM, None)
