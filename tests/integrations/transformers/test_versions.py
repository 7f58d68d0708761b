"""Supported versions of transformers, and the errors for others."""

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest

from pagedkv.extras import pip_install
from pagedkv.info import command
from pagedkv.integrations.transformers.versions import BEFORE, OLDEST, require_transformers

REMEDY = pip_install("transformers")


@pytest.mark.parametrize("version", ["5.20.0", "5.24.1", "5.24.0.dev0"])
def test_versions_that_are_taken(monkeypatch, version):
    monkeypatch.setattr(importlib.metadata, "version", {"transformers": version}.get)
    assert require_transformers() == version


@pytest.mark.parametrize("version", ["4.57.6", "5.19.1", "5.25.0", "6.0.0"])
def test_versions_that_are_not(monkeypatch, version):
    monkeypatch.setattr(importlib.metadata, "version", {"transformers": version}.get)
    message = f"transformers must be at least 5.20 and below 5.25, got {version}: {REMEDY}"
    with pytest.raises(ImportError, match=re.escape(message)):
        require_transformers()


def test_info_says_so(monkeypatch):
    use = "models of transformers"
    monkeypatch.setattr(command, "EXTRAS", {use: command.EXTRAS[use]})
    monkeypatch.setattr(importlib.metadata, "version", {"transformers": "5.25.0"}.get)
    monkeypatch.delitem(sys.modules, "pagedkv.integrations.transformers")
    [missing] = (row["what is missing"] for row in command.run(progress=lambda _: None) if row.get("to use") == use)
    assert missing == f"ImportError: transformers must be at least 5.20 and below 5.25, got 5.25.0: {REMEDY}"


@pytest.mark.parametrize("name", ["torch", "transformers"])
def test_without_one_of_them(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=f"{name} cannot be imported .*: {re.escape(REMEDY)}"):
        require_transformers()


def test_the_extra_asks_for_the_same():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    oldest, before = (".".join(map(str, bound)) for bound in (OLDEST, BEFORE))
    assert f"transformers>={oldest},<{before}" in project["optional-dependencies"]["transformers"]
