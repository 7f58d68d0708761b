"""What to type to install an extra of the package."""

from __future__ import annotations

from pathlib import Path


def pip_install(extra: str) -> str:
    """Return the pip command that adds an extra to this installation.

    The package is on no index yet, so ``pip install "pagedkv[plot]"`` finds it only among wheels of one's own. The
    command therefore names the place that the package came from, and works in any folder.

    Parameters
    ----------
    extra : str
        One of the extras in ``pyproject.toml``.

    Returns
    -------
    str
        With a clone in ``/src/pagedkv``, ``pip install -e "/src/pagedkv[plot]"`` if Python imports the clone, and
        ``pip install "pagedkv[plot] @ file:///src/pagedkv"`` if pip copied it. ``pip install "pagedkv[plot]"`` if pip
        took the package from an index, or from a folder of wheels.
    """
    # Only messages need these: they would take 5 % of `import pagedkv`.
    import json
    from importlib.metadata import PackageNotFoundError, distribution

    clone = Path(__file__).parents[1]
    if (clone / "pyproject.toml").exists():
        return f'pip install -e "{clone}[{extra}]"'
    try:
        recorded = distribution("pagedkv").read_text("direct_url.json")  # pip writes it if it got a path or a URL
    except PackageNotFoundError:  # somebody copied the folder pagedkv
        recorded = None
    if not recorded:
        return f'pip install "pagedkv[{extra}]"'
    origin = json.loads(recorded)
    vcs = f"{origin['vcs_info']['vcs']}+" if "vcs_info" in origin else ""
    return f'pip install "pagedkv[{extra}] @ {vcs}{origin["url"]}"'
