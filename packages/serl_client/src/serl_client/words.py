"""Checks the words of options, plans and commands, and suggests the word that a person meant."""

import difflib
from collections.abc import Collection
from typing import Any

from serl_client.errors import ConfigError


def check_choice(value: Any, choices: Collection[str], kind: str, where: str) -> Any:
    """Return `value` if it is one of `choices`. Else raises ConfigError, which names the nearest of them.

    kind: what is chosen, in one word, such as `phase`. where: the option, or the place in a plan, that says it.
    """
    if value in choices:
        return value
    raise ConfigError(f"{where}: no {kind} is called {value!r}; {nearest(value, choices) or 'there is none'}")


def nearest(word: Any, words: Collection[str]) -> str:
    """Return a question that names the nearest of `words`; empty if there are none."""
    near = difflib.get_close_matches(str(word), words, n=1, cutoff=0)
    return f"did you mean {near[0]!r}?" if near else ""
