"""Each setting of config/ is explained, and the page of settings says what the yamls say."""

import pytest

from tools.settings import BASE, CONFIG, PAGE, meaning, page, rows


@pytest.mark.parametrize(
    "file", [BASE, *sorted(CONFIG.glob("*/*.yaml"))], ids=lambda file: f"{file.parent.name}-{file.stem}"
)
def test_each_setting_of_a_yaml_has_a_comment(file):
    assert [name for name in rows(file) if not meaning(file, name)] == []


def test_the_page_of_settings_is_what_the_command_writes():
    assert PAGE.read_text() == page(), "run tools/settings.py"
