"""The page on publishing a recipe: its commands are run as they stand, its code is the
template's."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ottava_testing.new_recipe.names import Names
from ottava_testing.new_recipe.rendering import render
from tests.integration.template_environment import clean_variables

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "publish.md").read_text()
FILES = render(Names("acme-rows"))
COMMANDS = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.M | re.S)
    for line in block.splitlines()
]

# There is no index to fetch from. After the environment is made, this environment's libraries are
# linked into it, those with recipes left out; pip is to look nowhere else, and finds what the page
# asks for installed.
ENVIRONMENT = "python3 -m venv recipe-env"
LINKED = (
    f"{ENVIRONMENT}\n{sys.executable} {Path(__file__).parent / 'template_environment.py'} "
    f"recipe-env"
)
# The build backend would be fetched into an environment of its own.
EDITABLE = 'pip install -e ".[test]"'
SUBSTITUTIONS = {ENVIRONMENT: LINKED, EDITABLE: 'pip install --no-build-isolation -e ".[test]"'}


# test_template.py runs most of these in another environment.
@pytest.mark.slow
def test_the_page_can_be_followed(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python3"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()
    script = "set -eu\n" + "\n".join(
        f"echo '$ {line}'\n{SUBSTITUTIONS.get(line, line)}" for line in COMMANDS
    )
    variables = {
        "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin",
        "PIP_NO_INDEX": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=work,
        capture_output=True,
        text=True,
        env=clean_variables(**variables),
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    ran = dict(re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", done.stdout, re.M))
    assert list(ran) == COMMANDS
    assert "Successfully installed ottava-recipes-acme-rows-0.1.0" in ran[EDITABLE]
    listed = [
        line.split("│")[1].strip()
        for line in ran["ottava recipes"].splitlines()
        if line.startswith("│")
    ]
    assert listed == ["acme-rows"]
    assert ran["ls dist"].split() == [
        "ottava_recipes_acme_rows-0.1.0-py3-none-any.whl",
        "ottava_recipes_acme_rows-0.1.0.tar.gz",
    ]
    written = sorted(str(p.relative_to(work)) for p in work.iterdir())
    assert written == ["acme-rows", "recipe-env"]
    assert re.search(r"\d\d+ passed", ran["pytest"]), said
    assert "failed" not in ran["pytest"]
    assert re.search(
        r"^│ acme-rows +│", ran["ottava demo --recipe acme-rows --size tiny --steps 30"], re.M
    )


def test_the_pages_have_the_templates_files_and_code() -> None:
    block = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
    for path in FILES:
        if path.endswith(("plugin.py", "recipe.py")):
            (_, text) = PAGE.split(f"\n`{path}`:\n\n")
            assert block.findall(text)[0] == FILES[path]
    (classes,) = block.findall((DOCS / "classes.md").read_text())
    assert classes in block.findall(FILES["README.md"])
    assert sorted(re.findall(r"^\| `(.+?)` \|", PAGE, re.M)) == sorted(FILES)
    # The commands can be run without an upload.
    assert [COMMANDS.count(line) for line in SUBSTITUTIONS] == [1, 1]
    assert not any("twine" in line for line in COMMANDS)
    assert "twine upload" in PAGE
