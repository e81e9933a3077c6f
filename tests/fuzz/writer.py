"""Where the source of a module is written: its inputs, parameters and steps, each in a list."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.fuzz.grammar import Draw

LONGEST = 32  # rows of a buffer, more than any case has
SIZES: dict[str, dict[str, int]] = {
    "plain": {},
    "one head": {"h": 1, "g": 1},
    "one feature": {"d": 1},
    "seq = heads": {"s": 4, "t": 4},
    "batch = heads": {"b": 4},
    "all equal": {"b": 4, "s": 4, "t": 4, "p": 4, "d": 4},
    "one query": {"s": 1},
    "one of a batch": {"b": 1},
    "keys = features": {"s": 6, "t": 6},
    "longer": {"s": 17, "t": 19, "p": 9},
}
_PLAIN = {"b": 2, "s": 5, "t": 7, "p": 3, "h": 4, "g": 2, "d": 6}


@dataclass
class Writer:
    """A module's text in the making. Sizes are b, s, t and p (batch, queries, keys, past) and h, g,
    d and m (heads, heads of keys, features of a head, width); `inputs` are shapes in these letters,
    with a colon and the kind of their values.
    """

    draw: Draw
    inputs: dict[str, str] = field(default_factory=dict)
    made: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    indent: str = ""

    def is_(self, choice: str, *options: str) -> bool:
        """Whether the choice is one of these."""
        return self.draw[choice] in options

    def make(self, line: str) -> None:
        """A statement of `__init__`, once."""
        if line not in self.made:
            self.made.append(line)

    def run(self, *lines: str) -> None:
        """Statements of `forward`."""
        self.steps += [self.indent + line for line in lines]

    def take(self, name: str, shape: str) -> str:
        """An input; letters of the keys become those that the draw's keys have."""
        if self.is_("keys", "self"):
            shape = " ".join("s" if part == "t" else part for part in _parts(shape))
            shape = shape.replace(" :", ":")
        self.inputs[name] = shape
        return name

    @property
    def sizes(self) -> dict[str, int]:
        """The sample's."""
        found = {**_PLAIN, **SIZES[self.draw["sizes"]]}
        if self.is_("groups", "none"):
            found["g"] = found["h"]
        elif self.is_("groups", "one"):
            found["g"] = 1
        found["m"] = found["h"] * found["d"]
        if self.is_("keys", "self"):
            found["t"] = found["s"]
        elif self.is_("keys", "cache"):
            found["t"] = found["p"] + found["s"]
        return found

    @property
    def heads_first(self) -> bool:
        """Whether what is done to each head is done in (B, H, S, D), else in (B, S, H, D)."""
        return self.is_("layout", "bhsd", "column")

    @property
    def by_axes(self) -> str:
        """The axes of the scores: n is batch and heads in one, and there is no head in a loop."""
        layout = self.draw["layout"]
        if layout == "bshd" and not self.is_("softmax", "sdpa"):
            return self.draw["scores"]
        named = {"hbsd": "hbst", "merged": "nst", "column": "bhts", "loop": "bst"}
        return named.get(layout, "bhst")

    def placed(self, name: str, axes: str, *, keys: str = "t") -> str:
        """Code for a tensor of axes "st", or of four that broadcast with "bhst", at the scores."""
        square = axes == "st"
        match self.by_axes:
            case "hbst":
                return name if square else f"{name}.transpose(0, 1)"
            case "bhts":
                return f"{name}.mT"
            case "nst" if not square:
                return f"{name}.expand(b, H, s, {keys}).reshape(b * H, s, {keys})"
            case "bsht":
                return f"{name}[:, None]" if square else f"{name}.transpose(1, 2)"
            case "bsth":
                return f"{name}[:, :, None]" if square else f"{name}.permute(0, 2, 3, 1)"
            case "bst" if not square:
                return f"{name}[:, {'h' if axes == 'bhst' else '0'}]"
        return name

    @property
    def key_axis(self) -> int:
        """Where the scores have their keys, counted as a model would."""
        return {"bsth": 2, "bhts": -2}.get(self.by_axes, -1)

    @property
    def query_axis(self) -> int:
        """Where the scores have their queries."""
        return {"bsht": 1, "bsth": 1, "bhts": -1}.get(self.by_axes, -2)


def _parts(shape: str) -> list[str]:
    return shape.replace(":", " :").split(" ")
