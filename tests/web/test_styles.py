"""Every colour has a name on :root, and no other rule of the page's styles holds a colour of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

WEB = Path(__file__).parents[2] / "web" / "src"
SHEETS = sorted([*WEB.rglob("*.css"), *WEB.rglob("*.svelte")])
NAMED = (
    "aqua|azure|beige|black|blue|brown|coral|crimson|cyan|fuchsia|gold|gray|green|grey|indigo|ivory|khaki|"
    "lavender|lime|magenta|maroon|navy|olive|orange|orchid|pink|plum|purple|red|salmon|silver|snow|tan|teal|"
    "tomato|turquoise|violet|wheat|white|yellow|transparent"
)
LITERAL = re.compile(
    r"#[0-9a-f]{3,8}\b|\b(?:rgba?|hsla?|hwb|lab|lch|oklab|oklch|color)\(|(?<![-\w])(?:"
    + NAMED
    + r")(?![-\w(])",
    re.I,
)
REQUIRED = {
    "--hover-bg": None,
    "--chat-user-bg": "#1f6feb",
    "--chat-user-border": None,
    "--chat-error-bg": None,
    "--chat-error-border": None,
    "--chat-error-fg": None,
}


def styles(path: Path) -> str:
    text = path.read_text()
    if path.suffix == ".svelte":
        text = "\n".join(re.findall(r"<style>(.*?)</style>", text, re.S))
    return re.sub(r"/\*.*?\*/", "", text, flags=re.S)


def rules(css: str) -> list[tuple[str, str]]:
    """Selector and declarations of each innermost rule."""
    return [(selector.strip(), body) for selector, body in re.findall(r"([^{};]+)\{([^{}]*)\}", css)]


def literals(css: str) -> list[str]:
    return [
        f"{selector} {{ {match[0]} }}"
        for selector, body in rules(css)
        if not selector.startswith(":root")
        for declaration in body.split(";")
        if ":" in declaration
        for match in LITERAL.finditer(declaration.split(":", 1)[1])
    ]


@pytest.mark.parametrize(
    "css",
    [
        "a { color: #fff }",
        "a { border: 1px solid Red }",
        "a { background: rgb(1 2 3) }",
        "@media (x) { a { color: transparent } }",
        "a { fill: color-mix(in srgb, white 3%, var(--x)) }",
    ],
)
def test_the_search_finds_colours(css: str) -> None:
    assert literals(css)


def test_the_search_takes_no_names_for_colours() -> None:
    assert (
        literals(":root { --x: #fff } a { color: var(--code-red); white-space: pre; grid-area: tan-x }") == []
    )


@pytest.mark.parametrize("path", SHEETS, ids=lambda path: str(path.relative_to(WEB)))
def test_no_rule_holds_a_colour(path: Path) -> None:
    assert literals(styles(path)) == []


def test_nothing_else_sets_a_colour() -> None:
    """Attributes, inline styles and scripts take colours from properties too."""
    for path in [*WEB.rglob("*.svelte"), *WEB.rglob("*.ts")]:
        text = re.sub(r"<style>.*?</style>", "", path.read_text(), flags=re.S)
        assert not re.search(r"#[0-9a-f]{6}\b|\brgba?\(|\bhsla?\(", text, re.I), path
        assert not re.search(r"""\b(?:fill|stroke|color|background)=["'](?!none|url|\{|var)""", text), path
        assert 'style="' not in text, f"{path}: the CSP forbids style attributes"


def test_the_properties_are_on_root() -> None:
    body = "".join(
        body for selector, body in rules(styles(WEB / "styles" / "colours.css")) if selector == ":root"
    )
    found = dict(re.findall(r"(--[\w-]+):\s*([^;]+)", body))
    for name, value in REQUIRED.items():
        assert name in found
        if value is not None:
            assert found[name].strip() == value


def test_every_property_that_is_used_is_defined() -> None:
    texts = [path.read_text() for path in [*WEB.rglob("*.svelte"), *WEB.rglob("*.ts"), *WEB.rglob("*.css")]]
    everything = "\n".join(texts)
    defined = set(re.findall(r"(--[\w-]+)\s*:", everything)) | set(
        re.findall(r"style:(--[\w-]+)", everything)
    )
    used = set(re.findall(r"var\((--[a-z][\w-]*)\)", everything))
    assert used - defined == set()
