"""What the tests of the public face share."""

from pathlib import Path

import pytest


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where a configuration will be written."""
    return tmp_path / "mine.yaml"
