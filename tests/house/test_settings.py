"""Each setting of config/ is explained, and the page of settings says what the yamls say."""

import pytest

from tools.settings import BASE, CONFIG, PAGE, page, table

FILES = [BASE, *sorted(CONFIG.glob("*/*.yaml"))]


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_each_setting_of_a_yaml_has_a_comment(file):
    lacking = [row for row in table(file)[3:] if not row.split(" | ")[3]]
    assert lacking == [], "write what it means behind it: meaning, unit, allowed values, what null means"


def test_the_page_of_settings_is_what_the_command_writes():
    assert PAGE.read_text() == page(), "run tools/settings.py"
