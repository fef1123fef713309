"""Tasks in words become the tokens that pi0 was trained on, and a tokenizer that does not fit is refused."""

import logging

import pytest
import torch
from serl_client import ConfigError
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from serl_launcher.networks import prompt as module
from serl_launcher.networks.prompt import BOS, BYTES, PAD, Prompt

WORDS = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "push": 3, "the": 4, "cube": 5, "\n": 6, "<unk>": 7}


@pytest.fixture
def make_tokenizer(tmp_path):
    """make_tokenizer() is a folder with a tokenizer.json of eight words."""

    def make(words=WORDS, begins=False, images=False):
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
        splits = [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Split(" ", "removed")]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
        if begins:
            tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", None, [("<bos>", words["<bos>"])])
        if images:
            tokenizer.add_special_tokens([AddedToken("<image>", special=True)])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        return str(tmp_path)

    return make


def test_without_a_tokenizer_every_byte_of_one_line_of_words_is_a_token():
    tokens, words = Prompt(None, length=8, vocabulary=258)(["go", "é", "", " p_q\nr "])
    texts = (b"go\n", "é\n".encode(), b"\n", b"p q r\n")
    assert tokens.tolist() == [[BOS, *(BYTES + byte for byte in text)] + [PAD] * (7 - len(text)) for text in texts]
    assert words.sum(1).tolist() == [1 + len(text) for text in texts]
    assert torch.equal(words, tokens != PAD)


@pytest.mark.parametrize("begins", [True, False])
def test_every_prompt_begins_with_bos_once_whether_or_not_the_tokenizer_adds_it(make_tokenizer, begins):
    folder = make_tokenizer(begins=begins)
    for path in (folder, f"{folder}/tokenizer.json"):
        prompt = Prompt(path, length=6, vocabulary=8)
        assert prompt(["push the cube", "push"])[0].tolist() == [[2, 3, 4, 5, 6, 0], [2, 3, 6, 0, 0, 0]]


def test_a_word_whose_token_is_that_of_the_padding_is_read(make_tokenizer):
    words = {"push": 0, "\n": 1, "<unk>": 2}
    tokens, there = Prompt(make_tokenizer(words), length=4, vocabulary=3)(["push push"])
    assert (tokens.tolist(), there.tolist()) == ([[0, 0, 1, 0]], [[True, True, True, False]])


def test_what_is_too_long_is_cut_and_said_once(caplog):
    prompt = Prompt(None, length=4, vocabulary=258)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            tokens, words = prompt(["push"])
    assert tokens.tolist() == [[BOS, *(BYTES + byte for byte in b"pus")]]
    assert words.all()
    assert [record.getMessage() for record in caplog.records] == ["task 'push': cut from 6 to 4 tokens"]


def test_a_special_token_more_than_the_policy_has_is_left_out_and_said(make_tokenizer, caplog):
    prompt = Prompt(make_tokenizer(images=True), length=6, vocabulary=8)
    assert prompt(["push <image>"])[0].tolist() == prompt(["push"])[0].tolist() == [[2, 3, 6, 0, 0, 0]]
    assert [record.getMessage() for record in caplog.records] == [
        "task 'push <image>': token 8 is left out; the policy knows 8"
    ]


def test_of_the_tasks_that_actors_make_up_some_are_remembered(monkeypatch):
    monkeypatch.setattr(module, "KNOWN", 10)
    prompt = Prompt(None, length=8, vocabulary=258)
    for number in range(25):
        prompt([str(number)])
    assert len(prompt._known) <= 10


def test_a_tokenizer_that_is_not_there_or_too_large_is_refused(make_tokenizer, tmp_path):
    with pytest.raises(ConfigError, match=r"give a tokenizer\.json"):
        Prompt(str(tmp_path / "nowhere"), length=6, vocabulary=8)
    for tokenizer in (make_tokenizer(), None):
        with pytest.raises(ConfigError, match=r"tokens, and policy\.gemma\.vocabulary=7 has no room"):
            Prompt(tokenizer, length=6, vocabulary=7)
