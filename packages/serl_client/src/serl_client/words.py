"""Suggests the word that a person meant, for errors about options, plans and commands with a typo."""

import difflib
from collections.abc import Collection
from typing import Any

from serl_client.errors import ConfigError


def known(word: Any, words: Collection[str], kind: str, where: str) -> Any:
    """Return `word` if it is one of `words`. Else raises ConfigError, which names the nearest of them."""
    if word in words:
        return word
    raise ConfigError(f"{where}: no {kind} is called {word!r}; {nearest(word, words) or 'there is none'}")


def nearest(word: Any, words: Collection[str]) -> str:
    """Return a question that names the nearest of `words`; empty if there are none."""
    near = difflib.get_close_matches(str(word), words, n=1, cutoff=0)
    return f"did you mean {near[0]!r}?" if near else ""
