"""A run whose programs end with the test."""

import pytest

from tests.shared.programs import Programs


@pytest.fixture
def programs(tmp_path):
    with Programs(tmp_path) as made:
        yield made
