"""Renders the files of a new recipe package from its template."""

from __future__ import annotations

from pathlib import Path
from string import Template

import ottava
from ottava_testing.new_recipe.names import Names

# The template has the files of the package, each with .tmpl added to its name. In paths PACKAGE
# stands for the name of the module; texts have the names of string.Template.
TEMPLATE = Path(__file__).parent / "template"


def compatible_versions(version: str) -> str:
    """The versions of Ottava that a package written for ``version`` works with.

    They end before the next version that may break it. Before 1.0 the second number changes then
    (``>=0.1,<0.2``); from 1.0 on the first does (``>=1.2,<2``).
    """
    major, minor = (int(number) for number in version.split(".")[:2])
    following = f"0.{minor + 1}" if major == 0 else f"{major + 1}"
    return f">={major}.{minor},<{following}"


def render(names: Names) -> dict[str, str]:
    """The text of each file by its path in the package, with slashes."""
    values = {
        "name": names.recipe,
        "package": names.package,
        "distribution": names.distribution,
        "format": names.format,
        "ottava_versions": compatible_versions(ottava.__version__),
    }
    paths = {
        path.relative_to(TEMPLATE).as_posix(): path for path in sorted(TEMPLATE.rglob("*.tmpl"))
    }
    return {
        name.removesuffix(".tmpl").replace("PACKAGE", names.package): Template(
            path.read_text("utf-8")
        ).substitute(values)
        for name, path in paths.items()
    }
