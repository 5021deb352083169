"""The README's plots of training, as SVG, from the raw rows: speed, loss, and the share of an epoch.

    python scripts/training_plots.py [--into FOLDER]

In the report's colours, with a style of their own, since a picture in a README has no page around it.
What has no rows yet is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from readme_tables import RESULTS, read_rows
from training_tables import BASE, SPEED, Case, cases_of

from padless.packer.charts import brief, ticks_to
from padless.packer.page import text

STYLE = """<style>
svg{--paper:#fff;--ink:#1c2127;--quiet:#57606a;--rule:#d8dde3;--now:#0a6b64;--was:#a8480a;--third:#8d99a6}
@media(prefers-color-scheme:dark){svg{--paper:#14181c;--ink:#e7eaed;--quiet:#a3adb7;--rule:#323a42;
--now:#54c7ba;--was:#f2a261;--third:#7d8894}}
.paper{fill:var(--paper)} text{fill:var(--quiet);font:13px system-ui,sans-serif} text.mark{fill:var(--ink)}
rect.now,text.now{fill:var(--now)} rect.was,text.was{fill:var(--was)} rect.third{fill:var(--third)}
line{stroke:var(--rule)} path{fill:none;stroke-width:1.6} path.now{stroke:var(--now)}
path.was{stroke:var(--was);stroke-width:5;opacity:.55} path.third{stroke:var(--third);stroke-dasharray:5 5}
</style>"""
WIDTH, LEFT, ROW = 640, 250, 22
KINDS = {"padded": "was", "transformers": "third", "padless": "now"}
"""The first word of an arm -> its colour."""

Rows = Sequence[dict[str, Any]]


def kind_of(arm: str) -> str:
    """An arm's colour."""
    return KINDS.get(arm.replace(",", " ").split()[0], "third")


def picture(title: str, width: float, height: float, body: str) -> str:
    """A file of its own."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">'
        f'<title>{text(title)}</title>{STYLE}<rect class="paper" width="100%" height="100%"/>{body}</svg>\n'
    )


def _words(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{text(words)}</text>'


def throughput(cases: Sequence[Case]) -> str:
    """Bars of real tokens a second, by case; each case on a scale of its own."""
    body, y = "", 20
    for case in cases:
        body += _words(8, y, f"{case.name}: real tokens a second", "mark")
        y += 8
        most = max((found.get(SPEED, 0.0) for found in case.arms.values()), default=0.0) or 1.0
        for arm, found in case.arms.items():
            speed = found.get(SPEED)
            wide = (speed or 0) / most * (WIDTH - LEFT - 120)
            kind = kind_of(arm)
            body += _words(LEFT - 8, y + 15, arm, anchor="end")
            body += f'<rect class="{kind}" x="{LEFT}" y="{y + 3}" width="{wide:.1f}" height="{ROW - 6}"/>'
            words = "out of memory" if speed is None else f"{speed:,.0f}"
            if speed is not None and case.base and case.base.get(SPEED):
                words += f" ({speed / case.base[SPEED]:.1f} x)"
            body += _words(LEFT + wide + 6, y + 15, words)
            y += ROW
        y += 24
    return picture("Real tokens a second, by model and arm", WIDTH, y - 10, body)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Values over numbers: (x, y) each."""

    name: str
    kind: str
    points: list[tuple[float, float]]


def panel(curves: Sequence[Curve], x_title: str, y_ticks: Sequence[tuple[float, str]], at: float = 0) -> str:
    """Curves over an axis from 0, with lines at y_ticks; the whole begins at `at` from the left."""
    left, top, plot, tall = at + 56, 34, 330, 200
    every = [y for curve in curves for _, y in curve.points] + [y for y, _ in y_ticks]
    low, high = min(every), max(every)
    most = max(x for curve in curves for x, _ in curve.points)

    def down(y: float) -> float:
        return top + (high - y) / (high - low or 1) * tall

    body = ""
    for y, words in y_ticks:
        body += f'<line x1="{left}" y1="{down(y):.1f}" x2="{left + plot}" y2="{down(y):.1f}"/>'
        body += _words(left - 8, down(y) + 4, words, anchor="end")
    for tick in ticks_to(int(most)):
        body += _words(left + tick / most * plot, top + tall + 20, brief(tick), anchor="middle")
    body += _words(left + plot / 2, top + tall + 38, x_title, anchor="middle")
    for curve in curves:
        points = (f"{left + x / most * plot:.1f} {down(y):.1f}" for x, y in curve.points)
        body += f'<path class="{curve.kind}" d="M{" L".join(points)}"/>'
    return body


def names(curves: Sequence[Curve], at: float) -> str:
    """Of curves, in their colours, below each other."""
    return "".join(
        _words(at, 48 + 20 * number, curve.name, curve.kind) for number, curve in enumerate(curves)
    )


def epoch(case: Case) -> str:
    """Share of an epoch after so many steps and so much time: padded, and the fastest of padless."""
    assert case.base is not None and case.best is not None
    arms = {BASE: case.base, case.best: case.arms[case.best]}
    whole, body = case.base["tokens an epoch"], ""
    for number, (unit, metric) in enumerate((("steps", "tokens a step"), ("seconds", SPEED))):
        curves = [
            Curve(name=arm, kind=kind_of(arm), points=[(0.0, 0.0), (whole / found[metric], 1.0)])
            for arm, found in arms.items()
        ]
        y_ticks = [(share, f"{share:.0%}") for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
        body += panel(curves, unit, y_ticks, at=410 * number)
    body += names(curves, 815) + _words(8, 18, f"{case.name}: share of an epoch", "mark")
    return picture("Share of an epoch by steps and by time", 980, 280, body)


def losses(rows: Rows) -> str:
    """Loss by step of every case that was measured: sequences one by one, in other ways, and packed."""
    last = {(row["case"], row["arm"]): row["values"] for row in rows if row["metric"] == "loss"}
    cases, body = list(dict.fromkeys(case for case, _ in last)), ""
    kinds = {"one by one": "was", "packed": "now"}
    for number, case in enumerate(cases):
        own = {arm: values for (name, arm), values in last.items() if name == case}
        curves = [
            Curve(
                name=f"{arm}: {values[-1]:.4f}",
                kind=kinds.get(arm, "third"),
                points=[(step + 1.0, value) for step, value in enumerate(values)],
            )
            for arm, values in sorted(own.items(), key=lambda item: item[0] in kinds)
        ]
        every = [value for values in own.values() for value in values]
        y_ticks = [(float(tick), str(tick)) for tick in range(ceil(min(every)), int(max(every)) + 1)]
        own_body = (
            panel(curves, "steps", y_ticks) + names(curves, 396) + _words(8, 18, f"Loss: {case}", "mark")
        )
        body += f'<g transform="translate(0 {280 * number})">{own_body}</g>'
    return picture("Loss by step, packed and one by one", WIDTH, 280 * len(cases), body)


def main() -> None:
    """Draw what there are rows for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, default=RESULTS)
    options = parser.parse_args()
    cases = cases_of(read_rows("bench_training"))
    pictures = {}
    if cases:
        pictures["throughput"] = throughput(cases)
    if whole := [case for case in cases if case.base and SPEED in case.base and case.best]:
        pictures["epoch"] = epoch(whole[0])
    if rows := read_rows("loss_curves"):
        pictures["loss"] = losses(rows)
    for name, drawn in pictures.items():
        (options.into / f"training_{name}.svg").write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
