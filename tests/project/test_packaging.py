"""What stands about the package beside pyproject.toml: the conda recipe and the citation."""

import re
import tomllib
from pathlib import Path

import yaml

import pagedkv

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_recipe_says_what_pyproject_says():
    recipe = yaml.safe_load((ROOT / ".ci" / "conda-recipe" / "recipe.yaml").read_text())
    assert recipe["context"] == {
        "version": pagedkv.__version__,
        "python_min": PROJECT["requires-python"].removeprefix(">="),
    }
    first, *run = recipe["requirements"]["run"]
    assert first == "python >=${{ python_min }}"
    assert [requirement.replace(" ", "") for requirement in run] == PROJECT["dependencies"]
    [entry_point] = recipe["build"]["python"]["entry_points"]
    assert entry_point == f"pagedkv = {PROJECT['scripts']['pagedkv']}"
    assert (recipe["about"]["summary"], recipe["about"]["license"]) == (PROJECT["description"], PROJECT["license"])


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == pagedkv.__version__
    assert citation["license"] == PROJECT["license"]
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in PROJECT["authors"]]


def test_the_versions_page_names_the_lower_bounds():
    page = (ROOT / "docs" / "versions.md").read_text()
    bounds = dict(re.match(r"(\w+)>=([\d.]+)", requirement).groups() for requirement in PROJECT["dependencies"])
    rows = {"numpy": "NumPy", "numba": "numba", "ml_dtypes": "ml_dtypes"}
    assert set(bounds) == set(rows)
    for name, bound in bounds.items():
        assert f"| {rows[name]} | {bound} |" in page
