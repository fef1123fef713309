"""Builds HTML and SVG of elements: a text is always escaped, and only what `element` returns is markup."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from serl_client.names import cleaned

VOID = {"meta", "link", "img"}  # elements without an end


class Markup(str):
    """A text that is markup already. Only `element` and `joined` make it."""


def element(tag: str, *children: Any, **attributes: Any) -> Markup:
    """Return an element. A child that is not Markup becomes escaped text; None is left out.

    attributes: `class_` is class, `stroke_width` is stroke-width; one that is None is left out.
    """
    said = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{text(value)}"'
        for name, value in attributes.items() if value is not None
    )  # fmt: skip
    return Markup(f"<{tag}{said}>" if tag in VOID else f"<{tag}{said}>{joined(children)}</{tag}>")


def joined(children: Iterable[Any]) -> Markup:
    """Return several children one after the other."""
    return Markup("".join(each if isinstance(each, Markup) else text(each) for each in children if each is not None))


def text(value: Any) -> str:
    """Return a value as text that is never markup, and without control characters."""
    return escape(cleaned(str(value), "\n"))


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Markup:
    """Return a table. The first cell of a row names it. A column's head may explain itself: `name|sentence`."""
    heads = (column.partition("|") for column in columns)
    head = element("tr", *(element("th", name, scope="col", title=why or None) for name, _, why in heads))
    body = (
        element("tr", element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:])) for row in rows
    )
    made = element("table", element("thead", head), element("tbody", *body))
    return element("div", made, class_="wide", tabindex=0)  # so that keys scroll it, too


def number(value: float | None, unit: str = "") -> str:
    """Return a number for a person: three digits, or whole with commas from 1,000 on; `-` for none."""
    if value is None or value != value:
        return "-"
    short = f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"
    return f"{short} {unit}".strip()


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def size(count: float) -> str:
    """Return bytes with a unit."""
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def duration(seconds: float | None) -> str:
    """Return seconds as a person says them."""
    if seconds is None:
        return "-"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
