"""`python -m tests.corpus.packages [WORD ...]`: the rows whose names have a word, or all."""

import json
import sys
import warnings
from typing import Any

import torch

from tests.corpus.packages import kit

warnings.simplefilter("ignore")
torch.set_num_threads(1)


def main(words: list[str]) -> None:
    _stand_in()
    from tests.corpus.packages.trial import attempt

    for row in kit.rows():
        label = f"{row.package} {row.name}"
        if words and not any(word in label for word in words):
            continue
        print(json.dumps(attempt(row)), flush=True)


def _stand_in() -> None:
    """torchvision's compiled operators don't load beside a torch of another build: without them."""
    register: Any = torch.library.register_fake

    def registered(name: Any, *args: Any, **kwargs: Any) -> Any:
        if str(name).startswith("torchvision::"):
            return lambda function: function
        return register(name, *args, **kwargs)

    torch.library.register_fake = registered


main(sys.argv[1:])
