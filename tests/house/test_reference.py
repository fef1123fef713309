"""The generated pages of docs/reference are what tools/reference.py writes."""

import re

import pytest

from serl_launcher.config import groups
from tests.shared.common import CONFIG
from tools.reference import PAGES, REFERENCE


def written(name):
    return (REFERENCE / f"{name}.md").read_text()


@pytest.mark.parametrize("name", ["columns", "hardware"])
def test_a_page_is_what_the_command_writes(name):
    assert written(name) == "\n".join(PAGES[name]()) + "\n", "run tools/reference.py"


def test_every_algorithm_that_acts_has_a_row():
    rows = re.findall(r"^\| `(\w+)`", written("algorithms"), flags=re.MULTILINE)
    assert rows == [name for name in groups(CONFIG)["algo"] if name not in ("judge", "reward_classifier")]


@pytest.mark.nightly
def test_the_page_of_algorithms_is_what_the_command_writes():
    assert written("algorithms") == "\n".join(PAGES["algorithms"]()) + "\n", "run tools/reference.py"
