"""One page of HTML that needs nothing else: facts, plots and tables, light and dark."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2933; --paper: #ffffff; --soft: #5b6673;
  --grid: #c9d1d9; --band: #f4f6f8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e8ee; --paper: #14181d; --soft: #98a4b3;
  --grid: #47515d; --band: #1d232a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 56rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.15rem; margin: 2.25rem 0 .5rem; }
p { margin: .25rem 0 .75rem; } .soft, figcaption { color: var(--soft); font-size: .9rem; }
figure { margin: 0 0 1.5rem; overflow-x: auto; }
svg { display: block; width: 100%; height: auto; min-width: 26rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .75rem .3rem 0; vertical-align: top; }
th:not(.number) { text-align: left; }
tr + tr { border-top: 1px solid var(--grid); } thead th { color: var(--soft); font-weight: 500; }
.number { text-align: right; white-space: nowrap; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; font-size: .9rem;
  background: var(--band); padding: .75rem 1rem; border-radius: .4rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 34rem) { dl { grid-template-columns: 1fr; gap: 0; }
  dd { margin-bottom: .4rem; } }
"""


@dataclass
class Page:
    """What goes on it; texts are escaped, and SVG is taken as it is."""

    title: str
    lead: str
    facts: Mapping[str, Any]
    _parts: list[str] = field(default_factory=list)

    def add_plot(self, heading: str, svg: str, caption: str) -> None:
        """Append a plot under a heading."""
        told = html.escape(caption)
        self._parts.append(
            f"<h2>{html.escape(heading)}</h2>\n"
            f"<figure>{svg}<figcaption>{told}</figcaption></figure>"
        )

    def add_table(self, heading: str, names: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Append a table under a heading; numbers stand to the right."""
        first = rows[0] if rows else [""] * len(names)
        head = "".join(_cell(n, "th", each) for n, each in zip(names, first, strict=True))
        body = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
        self._parts.append(
            f'<h2>{html.escape(heading)}</h2>\n<div class="wide"><table><thead><tr>{head}</tr>'
            f"</thead><tbody>\n{body}\n</tbody></table></div>"
        )

    def html(self) -> str:
        """Return the whole page."""
        facts = "\n".join(
            f"<dt>{html.escape(name)}</dt><dd>{html.escape(_text(fact))}</dd>"
            for name, fact in self.facts.items()
            if fact not in (None, "", {}, [])
        )
        title = html.escape(self.title)
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
            f'<p class="soft">{html.escape(self.lead)}</p>\n'
            + "\n".join(self._parts)
            + f"\n<h2>How it came about</h2>\n<dl>\n{facts}\n</dl>\n</body>\n</html>\n"
        )


def _cell(value: Any, tag: str = "td", like: Any = None) -> str:
    """Return a cell; a heading stands as the value `like` below it."""
    kind = type(value if like is None else like)
    number = ' class="number"' if kind in (int, float) else ""
    text = str(value)
    if isinstance(value, float):
        text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"<{tag}{number}>{html.escape(text)}</{tag}>"


def _text(fact: Any) -> str:
    if isinstance(fact, Mapping):
        return ", ".join(
            f"{name}: {_text(each)}" for name, each in fact.items() if each not in ("", None)
        )
    if isinstance(fact, list | tuple):
        return ", ".join(map(_text, fact))
    return str(fact)
