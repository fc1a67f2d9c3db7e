from pathlib import Path

import pytest

from tests.unit.config.tiny_command import TinyCommand, make_command


@pytest.fixture
def command(tmp_path: Path) -> TinyCommand:
    return make_command(tmp_path)
