"""Elements of SVG pictures for light and dark pages and notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

# The picture has its own background, since a page may be dark while the system is light.
_STYLE = (
    "svg.lanes{color-scheme:light dark}svg.lanes .page{fill:#fff}svg.lanes text{fill:#1f2933}"
    "svg.lanes .pale{fill:#52606d}svg.lanes .grid{stroke:#cbd2d9}svg.lanes .moved{fill:#eef1f4}"
    "@media(prefers-color-scheme:dark){svg.lanes .page{fill:#181b20}svg.lanes text{fill:#e4e7eb}"
    "svg.lanes .pale{fill:#a5afba}svg.lanes .grid{stroke:#48515c}svg.lanes .moved{fill:#272c33}}"
)


class Svg(str):
    """A picture: the text of an SVG file, which a notebook shows."""

    __slots__ = ()

    def _repr_svg_(self) -> str:
        return str(self)


def svg(width: float, height: float, title: str, description: str, parts: Sequence[str]) -> Svg:
    """Make a picture from its parts; screen readers read the title and the description."""
    return Svg(
        f'<svg xmlns="http://www.w3.org/2000/svg" class="lanes" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" role="img" font-family="system-ui, sans-serif">\n'
        f"<title>{escape(title)}</title>\n<desc>{escape(description)}</desc>\n<style>{_STYLE}</style>\n"
        f'<rect class="page" width="{width:g}" height="{height:g}" rx="8"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def text(x: float, y: float, words: object, size: int = 12, anchor: str = "start", pale: bool = False) -> str:
    """Make a line of text."""
    kind = ' class="pale"' if pale else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"{kind}>{escape(str(words))}</text>'


def cell(x: float, y: float, width: float, height: float, colour: str, words: str, title: str) -> str:
    """Make a coloured box with words in its middle and a tooltip."""
    return (
        f'<g><title>{escape(title)}</title><rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
        f'fill="{colour}" fill-opacity=".28" stroke="{colour}"/>'
        f"{text(x + width / 2, y + height / 2 + 3.5, words, 10, 'middle')}</g>"
    )
