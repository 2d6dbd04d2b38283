"""mkdocs hook: equations become MathML while the site is built, so that a page needs no script from elsewhere."""

import html
import re
from typing import Any

from latex2mathml.converter import convert

_SPAN = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    """Replace each equation that arithmatex marked."""

    def mathml(match: re.Match[str]) -> str:
        display = "block" if match.group(2) == "[" else "inline"
        return convert(html.unescape(match.group(3)), display=display)

    return _SPAN.sub(mathml, content)
