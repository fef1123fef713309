"""Folders of small pretrained policies of lerobot."""

import pytest

from tests.shared import lerobot_policies as small


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    pytest.importorskip("num2words", reason="the extra `vla` is not installed: . examples/install.sh --extra vla")
    small.language(folder := tmp_path_factory.mktemp("words"))
    return folder


@pytest.fixture
def folder(words, tmp_path, monkeypatch):
    """Makes the folder of a pretrained policy."""
    if small.HAS_PI:
        small.shrink_pi(monkeypatch)
    small.read_here(words, monkeypatch)

    def made(kind, **options):
        return small.pretrained(kind, tmp_path / kind, words, **options)

    return made
