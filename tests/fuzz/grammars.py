"""The grammars that there are, by their names in results and on the command line."""

from __future__ import annotations

from tests.fuzz.decoding import DECODERS
from tests.fuzz.grammar import Grammar
from tests.fuzz.source import ATTENTIONS
from tests.fuzz.stacking import STACKS

GRAMMARS: dict[str, Grammar] = {"attentions": ATTENTIONS, "stacks": STACKS, "decoders": DECODERS}
