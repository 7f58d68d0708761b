"""The command that installs an extra."""

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

from pagedkv import extras


def test_a_clone_is_named_by_its_folder():
    assert extras.pip_install("plot") == f'pip install -e "{Path(__file__).parents[1]}[plot]"'


@pytest.mark.parametrize(
    ("recorded", "source"),
    [
        (None, ""),
        ({"url": "file:///src/pagedkv", "dir_info": {}}, " @ file:///src/pagedkv"),
        ({"url": "file:///tmp/x.whl", "archive_info": {"hash": "sha256=0"}}, " @ file:///tmp/x.whl"),
        ({"url": "file:///src/pagedkv", "vcs_info": {"vcs": "git", "commit_id": "0"}}, " @ git+file:///src/pagedkv"),
    ],
)
def test_an_installed_copy_comes_from_where_it_came_from(monkeypatch, tmp_path, recorded, source):
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "pagedkv" / "extras.py"))
    text = None if recorded is None else json.dumps(recorded)
    monkeypatch.setattr(
        "importlib.metadata.distribution", lambda name: SimpleNamespace(read_text={"direct_url.json": text}.get)
    )
    assert extras.pip_install("plot") == f'pip install "pagedkv[plot]{source}"'


def test_a_copied_folder_has_no_record(monkeypatch, tmp_path):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(extras, "__file__", str(tmp_path / "pagedkv" / "extras.py"))
    monkeypatch.setattr("importlib.metadata.distribution", missing)
    assert extras.pip_install("plot") == 'pip install "pagedkv[plot]"'
