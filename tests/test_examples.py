"""Each example prints what the file beside it says."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one_line"])
def test_an_example_prints_what_the_file_beside_it_says(name, tmp_path):
    printed = subprocess.run(
        [sys.executable, EXAMPLES / name / "app.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout

    assert printed == (EXAMPLES / name / "expected.txt").read_text()
