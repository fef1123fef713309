"""Tokenises a task's words (the prompt) for PI0: by PaliGemma's tokenizer, or byte by byte without one."""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from serl_client.errors import ConfigError
from torch import Tensor
from torch.nn import functional

log = logging.getLogger(__name__)

PAD, BOS, BYTES = 0, 1, 2  # of the byte tokenizer: byte b is the token BYTES + b
KNOWN = 1000  # tasks whose tokens are cached


class Prompt:
    """Turn B tasks into tokens [B, length], in pi0's format: <bos>, the words, a line feed, then padding.

    tokenizer: path of a tokenizer.json or of its folder (PaliGemma's for pi0_base); None: bytes.
    length: tokens per task. Longer tasks are cut, with a warning.
    vocabulary: number of tokens that the policy knows. Others are left out, with a warning: PaliGemma's tokenizer has
        one more than pi0, <image>.

    Both only warn, because actors choose their tasks. Raises ConfigError if the file does not exist or has more than
    `vocabulary` regular tokens.
    """

    def __init__(self, tokenizer: str | None, *, length: int, vocabulary: int) -> None:
        self.length, self.vocabulary = length, vocabulary
        self._tokenizer = None if tokenizer is None else _opened(Path(tokenizer).expanduser())
        size = BYTES + 256 if self._tokenizer is None else self._tokenizer.get_vocab_size(with_added_tokens=False)
        if size > vocabulary:
            raise ConfigError(f"the tokenizer has {size} tokens, and policy.gemma.vocabulary={vocabulary} has no room")
        self._known: dict[str, tuple[Tensor, Tensor]] = {}

    @property
    def is_bytes(self) -> bool:
        """Whether there is no tokenizer."""
        return self._tokenizer is None

    def __call__(self, task: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return tokens [B, length] int64 and a mask [B, length] bool, False for padding; both on the CPU."""
        tokens, words = zip(*(self._row(text) for text in task), strict=True)
        return torch.stack(tokens), torch.stack(words)

    def _row(self, text: str) -> tuple[Tensor, Tensor]:
        if text not in self._known:
            if len(self._known) >= KNOWN:
                self._known.clear()
            found = self._tokens(text.strip().replace("_", " ").replace("\n", " ") + "\n")
            tokens = [token for token in found if token < self.vocabulary]
            if len(tokens) < len(found):
                log.warning("task %r: token %d is left out; the policy knows %d", text, max(found), self.vocabulary)
            if len(tokens) > self.length:
                log.warning("task %r: cut from %d to %d tokens", text, len(tokens), self.length)
            kept = torch.tensor(tokens[: self.length], dtype=torch.int64)
            row = functional.pad(kept, (0, self.length - len(kept)), value=PAD)
            self._known[text] = row, torch.arange(self.length) < len(kept)
        return self._known[text]

    def _tokens(self, words: str) -> list[int]:
        if self._tokenizer is None:
            return [BOS, *(BYTES + byte for byte in words.encode())]
        begin = self._tokenizer.token_to_id("<bos>")  # not every tokenizer.json adds it by itself
        tokens = self._tokenizer.encode(words, add_special_tokens=False).ids
        return tokens if begin is None else [begin, *tokens]


def _opened(path: Path):
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"policy.tokenizer={path}: give a tokenizer.json, or a folder with one (google/paligemma-3b-pt-224)"
        )
    return Tokenizer.from_file(str(file))
