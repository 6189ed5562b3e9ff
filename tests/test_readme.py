"""The README's numbers and links; tests/docs/test_commands.py runs its commands."""

import re
from pathlib import Path

from tests.training.context_faults import CONTEXT_FAULTS
from tests.training.test_faults import FAULTS, FAULTS_OF_SHARED_GROUPS
from tests.training.test_layouts import LAYOUTS

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_numbers_of_layouts_and_faults_are_those_of_the_suites():
    assert f"| {len(LAYOUTS)} layouts of" in README
    num_faults = len(FAULTS) + len(FAULTS_OF_SHARED_GROUPS) + len(CONTEXT_FAULTS)
    assert f"{num_faults} seeded faults" in README


def test_every_page_that_the_readme_names_is_there():
    for page in re.findall(r"\]\(([^)h][^)]*)\)", README):
        assert (Path(__file__).parent.parent / page.partition("#")[0]).exists(), page
