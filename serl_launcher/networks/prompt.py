"""Tasks in words as tokens: by the tokenizer of a pre-trained model, or byte by byte where there is none."""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from serl_client.errors import ConfigError
from torch import Tensor
from torch.nn import functional

log = logging.getLogger(__name__)

PAD, BOS, BYTES = 0, 1, 2  # of the byte tokenizer: byte b is the token BYTES + b
KNOWN = 1000  # tasks whose tokens are kept


class Prompt:
    """Tokens [B, length] of B tasks, as pi0 was trained on them: <bos>, the words, a line feed; then padding.

    `tokenizer` is a tokenizer.json (PaliGemma's for pi0_base), or the folder that holds it; None stands for bytes. What
    is longer than `length` is cut, and a token that is not among the first `vocabulary` is left out (PaliGemma's has
    one more than pi0, <image>), both with a warning: actors choose their tasks, and none may end the run. Raises
    ConfigError when there is no such file.
    """

    def __init__(self, tokenizer: str | None, *, length: int, vocabulary: int) -> None:
        self.length, self.vocabulary = length, vocabulary
        self._tokenizer = None if tokenizer is None else _opened(Path(tokenizer).expanduser())
        size = BYTES + 256 if self._tokenizer is None else self._tokenizer.get_vocab_size(with_added_tokens=False)
        if size > vocabulary:
            raise ConfigError(f"the tokenizer has {size} tokens, and policy.gemma.vocabulary={vocabulary} has no room")
        self._known: dict[str, tuple[Tensor, Tensor]] = {}

    def __call__(self, task: Sequence[str]) -> tuple[Tensor, Tensor]:
        """(tokens [B, length] int64, which of them are none of the padding [B, length] bool), on the CPU."""
        tokens, words = zip(*(self._row(text) for text in task), strict=True)
        return torch.stack(tokens), torch.stack(words)

    def _row(self, text: str) -> tuple[Tensor, Tensor]:
        if text not in self._known:
            if len(self._known) >= KNOWN:
                self._known.clear()
            found = self._tokens(text.strip().replace("_", " ").replace("\n", " ") + "\n")
            tokens = [token for token in found if token < self.vocabulary]
            if len(tokens) < len(found):
                log.warning("the task %r has the token %d; the policy has %d", text, max(found), self.vocabulary)
            if len(tokens) > self.length:
                log.warning("the task %r has %d tokens; the policy reads %d", text, len(tokens), self.length)
            kept = torch.tensor(tokens[: self.length], dtype=torch.int64)
            row = functional.pad(kept, (0, self.length - len(kept)), value=PAD)
            self._known[text] = row, torch.arange(self.length) < len(kept)
        return self._known[text]

    def _tokens(self, words: str) -> list[int]:
        if self._tokenizer is None:
            return [BOS, *(BYTES + byte for byte in words.encode())]
        begin = self._tokenizer.token_to_id("<bos>")  # files differ in whether they add it by themselves
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
