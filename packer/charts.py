"""Charts as inline SVG, drawn when the page is written: no script, themed by the page's style.

They are 440 units wide, which is a column of the page, so that their letters keep their size; a name and a
description in words stand in each for those who do not see it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from padless.packer.page import text

WIDTH, HEIGHT = 440, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 22, 40
_LABEL_GAP = 17


def _svg(title: str, description: str, parts: Sequence[str]) -> str:
    label = text(f"{title}. {description}", 900)
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
        f"{''.join(parts)}</svg></figure>"
    )


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> str:
    classes = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{classes}>{text(words)}</text>'


def _share_axis() -> list[str]:
    """Lines at 0, 50 and 100 %."""
    parts = []
    for share in (0.0, 0.5, 1.0):
        y = HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{WIDTH - _RIGHT}" y2="{y:.1f}"/>')
        parts.append(_text(_LEFT - 8, y + 4, f"{share:.0%}", anchor="end"))
    return parts


def lines(
    title: str, x_title: str, ticks: Sequence[str], series: Sequence[tuple[str, str, Sequence[float]]]
) -> str:
    """Shares over evenly spaced ticks: (name, now | was | third, a share for each tick), named at their "
    "ends."""
    room = 134  # for the names
    width, height = WIDTH - _LEFT - room, HEIGHT - _TOP - _BOTTOM
    step = width / max(1, len(ticks) - 1)
    parts = _share_axis()
    for number, tick in enumerate(ticks):
        parts.append(_text(_LEFT + number * step, HEIGHT - _BOTTOM + 17, tick))
    parts.append(_text(_LEFT + width / 2, HEIGHT - 5, x_title))
    labels = []
    for name, kind, shares in series:
        points = [
            f"{_LEFT + number * step:.1f} {HEIGHT - _BOTTOM - share * height:.1f}"
            for number, share in enumerate(shares)
        ]
        parts.append(f'<path class="{kind}" d="M{" L".join(points)}"/>')
        labels.append((HEIGHT - _BOTTOM - shares[-1] * height, f"{name} {shares[-1]:.1%}", kind))
    below = HEIGHT - _BOTTOM + 4.0
    for y, words, kind in sorted(labels, reverse=True):
        at = min(y + 4, below)
        below = at - _LABEL_GAP
        parts.append(_text(_LEFT + width + 8, at, words, kind, "start"))
    described = "; ".join(
        f"{name}: {', '.join(f'{tick} {share:.1%}' for tick, share in zip(ticks, shares, strict=True))}"
        for name, _, shares in series
    )
    return _svg(title, described, parts)


def histogram(
    title: str,
    x_title: str,
    edges: Sequence[str],
    counts: Sequence[int],
    *,
    outline: Sequence[int] | None = None,
    marks: Sequence[tuple[float, str]] = (),
    every: int = 1,
) -> str:
    """Bars between edges over lines at round counts; `outline`: other counts behind them.

    `marks`: (place in bars from the left, words) of lines across; `every`: how many edges a label.
    """
    width, height = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
    step = width / max(1, len(counts))
    most = max(1, *counts, *(outline or ()))
    base = HEIGHT - _BOTTOM
    parts = [f'<line x1="{_LEFT}" y1="{base}" x2="{WIDTH - _RIGHT}" y2="{base}"/>']
    for tick in ticks_to(most):
        y = base - tick / most * height
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{WIDTH - _RIGHT}" y2="{y:.1f}"/>')
        parts.append(_text(_LEFT - 8, y + 4, brief(tick), anchor="end"))
    for values, kind, inset in ((outline, "third", 0.0), (counts, "now", 0.12)):
        for number, count in enumerate(values or ()):
            if count:
                tall = max(1.5, count / most * height)
                x = _LEFT + (number + inset / 2) * step
                parts.append(
                    f'<rect class="{kind}" x="{x:.1f}" y="{base - tall:.1f}" '
                    f'width="{step * (1 - inset):.1f}" height="{tall:.1f}"/>'
                )
    for number, edge in enumerate(edges):
        if number % every == 0:
            anchor = "end" if number == len(edges) - 1 else "middle"
            parts.append(_text(_LEFT + number * step, base + 17, edge, anchor=anchor))
    parts.append(_text(_LEFT + width / 2, HEIGHT - 5, x_title))
    for place, words in marks:
        x = _LEFT + place * step
        parts.append(f'<line class="mark" x1="{x:.1f}" y1="{_TOP - 6}" x2="{x:.1f}" y2="{base}"/>')
        parts.append(_text(min(max(x, _LEFT + 30), WIDTH - 42), _TOP - 10, words, "mark"))
    described = ", ".join(
        f"{begin} to {end}: {count:,}"
        for begin, end, count in zip(edges, edges[1:], counts, strict=False)
        if count
    )
    return _svg(title, described, parts)


def ticks_to(most: int) -> list[int]:
    """Two to four round numbers up to `most`, a step of 1, 2 or 5 tens apart; of 1 only itself."""
    steps = (digit * 10**tens for tens in itertools.count() for digit in (1, 2, 5))
    step = next(step for step in steps if most // step <= 4)
    return list(range(step, most + 1, step))


def strip(parts: Sequence[tuple[str, float]], label: str) -> str:
    """A bar over the whole width of its place: (now | was | third, share of it) from the left."""
    rects, at = ['<rect class="wash" x="0" width="100%" height="100%"/>'], 0.0
    for kind, share in parts:
        if share > 0:
            rects.append(
                f'<rect class="{kind}" x="{at:.3%}" width="{min(share, 1 - at):.3%}" height="100%"/>'
            )
        at = min(1.0, at + share)
    return f'<svg class="strip" role="img" aria-label="{text(label)}">{"".join(rects)}</svg>'


def key(entries: Sequence[tuple[str, str]]) -> str:
    """What the colours stand for: (now | was | third, words)."""
    return '<p class="key">{}</p>'.format(
        "".join(
            '<span><svg viewBox="0 0 10 10" aria-hidden="true">'
            f'<rect class="{kind}" width="10" height="10"/></svg>{text(words)}</span>'
            for kind, words in entries
        )
    )


def brief(number: float) -> str:
    """A number in a few letters: 1.2 M, 34 k, 560."""
    for unit, word in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= unit:
            return f"{number / unit:.3g}{word}"
    return f"{number:.3g}"
