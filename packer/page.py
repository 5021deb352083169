"""The shell of an HTML page that needs nothing but itself: no script, no network, nothing for data to start.

Whatever comes from a data set goes through `text`, which escapes it, makes control and direction characters
visible and cuts what is endless. A content policy in the page forbids everything but its own style, should a
mistake let markup through after all.
"""

from __future__ import annotations

import errno
import html
import os
import re
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from padless.packer.inspect import visible

_LONGEST = 300
_LONGEST_NAME = 70
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1c2127;--quiet:#57606a;--rule:#d8dde3;--wash:#f4f6f8;
--now:#0a6b64;--was:#a8480a;--third:#8d99a6;--note:#fff4e0;--note-ink:#6b3d00}
@media (prefers-color-scheme:dark){:root{--paper:#14181c;--ink:#e7eaed;--quiet:#a3adb7;--rule:#323a42;
--wash:#1d2328;--now:#54c7ba;--was:#f2a261;--third:#7d8894;--note:#33270f;--note-ink:#ffd9a0}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;
font-variant-numeric:tabular-nums}
main,footer{max-width:67rem;margin:0 auto;padding:0 1.25rem}
header{padding:2.5rem 0 1rem}
h1{font-size:clamp(1.75rem,5.5vw,3rem);line-height:1.12;letter-spacing:-.02em;font-weight:650;
margin:.4rem 0 1rem;
max-width:22em;overflow-wrap:anywhere}
h1 strong{color:var(--now);font-weight:750}
h2{font-size:1.15rem;line-height:1.3;margin:0 0 .25rem}
h2.next{margin-top:1.6rem}
.strip+.scroll,.scroll+.scroll{margin-top:1.2rem}
p{margin:.4rem 0;max-width:44rem;overflow-wrap:anywhere}
.quiet,.meaning,figcaption,caption{color:var(--quiet);font-size:.875rem}
.meaning{margin:0 0 .9rem;max-width:44rem}
section{border-top:1px solid var(--rule);padding:1.6rem 0 1.4rem;min-width:0}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,27rem),1fr));column-gap:3rem}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:1rem 1.5rem;
margin:1.5rem 0 1.8rem}
.facts div{min-width:0}
.facts dt{color:var(--quiet);font-size:.875rem}
.facts dd{margin:0;font-size:1.5rem;font-weight:600;line-height:1.25}
.facts dd small{display:block;font-size:.8125rem;font-weight:400;color:var(--quiet);line-height:1.4}
.notes{list-style:none;margin:0 0 1.6rem;padding:0}
.notes li{background:var(--note);color:var(--note-ink);padding:.6rem .9rem;border-radius:.4rem;
margin:.45rem 0;
overflow-wrap:anywhere}
.option{white-space:nowrap}
.unseen{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
.scroll{overflow-x:auto;position:relative}
.scroll:focus-visible,summary:focus-visible{outline:2px solid var(--now);outline-offset:2px}
table{border-collapse:collapse;width:100%;font-size:.9375rem}
th,td{padding:.3rem .9rem .3rem 0;text-align:right;border-bottom:1px solid var(--rule);
vertical-align:baseline;
white-space:nowrap}
th{font-weight:600;color:var(--quiet);font-size:.8125rem}
tbody th{color:var(--ink);font-size:.9375rem;font-weight:400}
th.words,td.words{text-align:left}
td.long,th.long{white-space:normal;overflow-wrap:anywhere;min-width:11rem}
tr>.words:not(:first-child){padding-left:.6rem}
tr.here th,tr.here td{font-weight:650}
tr>*:last-child{padding-right:0}
td.bar{width:30%;min-width:6rem}
figure{margin:0}
figure svg{display:block;width:100%;height:auto}
.strip{display:block;width:100%;height:1.1rem;border-radius:.2rem}
.was-bar,.now-bar{display:grid;grid-template-columns:4.2rem 1fr 4.4rem;gap:.75rem;align-items:center;
margin:.35rem 0}
.was-bar b,.now-bar b{text-align:right}
.was-bar b{color:var(--was)} .now-bar b{color:var(--now)}
svg text{fill:var(--quiet);font-size:13px;font-family:inherit}
svg .mark{fill:var(--ink);font-weight:600}
svg .now{fill:var(--now)} svg .was{fill:var(--was)} svg .third{fill:var(--third)} svg .wash{fill:var(--wash)}
svg text.now{fill:var(--now);font-weight:600} svg text.was{fill:var(--was);font-weight:600}
svg text.third{fill:var(--quiet);font-weight:600}
svg line,svg path.edge{stroke:var(--rule);stroke-width:1;fill:none}
svg path.now,svg path.was,svg path.third{fill:none;stroke-width:2.5;stroke-linejoin:round;
stroke-linecap:round}
svg path.now{stroke:var(--now)} svg path.was{stroke:var(--was)}
svg path.third{stroke:var(--third);stroke-dasharray:5 5}
svg line.mark{stroke:var(--ink);stroke-dasharray:2 3}
.key{display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;margin:.2rem 0 .8rem;font-size:.875rem;color:var(--quiet)}
.key svg{width:.8rem;height:.8rem;margin-right:.4rem;vertical-align:-.05rem}
details{margin:.6rem 0 0;font-size:.9375rem}
summary{cursor:pointer;color:var(--quiet);font-size:.875rem}
pre{white-space:pre-wrap;overflow-wrap:anywhere;
font:.9rem/1.55 ui-monospace,"SF Mono",Menlo,Consolas,monospace;
background:var(--wash);padding:.9rem 1rem;border-radius:.4rem;margin:.5rem 0}
pre mark{background:none;color:var(--now);font-weight:650}
pre b,b.special{font-weight:inherit;border-bottom:2px dotted currentColor}
pre .masked{color:var(--quiet)}
footer{border-top:1px solid var(--rule);margin-top:1rem;padding-top:1rem;padding-bottom:2.5rem}
@media (max-width:36rem){svg text{font-size:15px}.wide{display:none}header{padding-top:1.5rem}
thead th{white-space:normal}
th,td{padding-right:.6rem}td.long,th.long{min-width:6.5rem}
.was-bar,.now-bar{grid-template-columns:3.4rem 1fr 4.4rem;gap:.5rem}}
@media print{:root{--paper:#fff;--ink:#000;--quiet:#444;--rule:#bbb;--wash:#f2f2f2;--now:#0a6b64;
--was:#a8480a;
--third:#777;--note:#fff4e0;--note-ink:#4a2a00}*{print-color-adjust:exact;-webkit-print-color-adjust:exact}
section,figure,tr,.notes li{break-inside:avoid}body{font-size:11pt}details{display:none}
main,footer{max-width:none;padding:0}}
"""


def text(content: object, longest: int = _LONGEST) -> str:
    """Something of a data set's as text of a page: escaped, nothing invisible, of a bounded length."""
    words = str(content)
    if len(words) > longest:
        words = f"{words[: longest - longest // 3]} … {words[-(longest // 3) :]}"
    return html.escape(visible(words), quote=True)


def name(content: str) -> str:
    """A source's name as text of a page, short enough for a phone, which may break behind / and _."""
    return re.sub("[/_]", r"\g<0><wbr>", text(content, _LONGEST_NAME))


def prose(content: str) -> str:
    """A sentence of ours as text of a page, in which options stay whole."""
    return re.sub("--[a-z-]+", r'<span class="option">\g<0></span>', text(content, 1000))


def page(title: str, body: Iterable[str], footer: str) -> str:
    """A whole page; `title` is plain text, `body` and `footer` are HTML."""
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>",
            *body,
            f"</main>\n<footer>{footer}</footer>\n</body>\n</html>\n",
        ]
    )


def write_page(path: str | Path, content: str) -> None:
    """Write a page whole or not at all; OSError where it cannot be.

    What a link names is written, and not the link; a device or a pipe takes the page and stays what it is.
    """
    if not Path(path).name:
        raise IsADirectoryError(errno.EISDIR, "is a folder; give the name of a file", str(path))
    # What a data set spelled as a lone surrogate is no text; `visible` has shown it as an escape.
    data = content.encode("utf-8", "backslashreplace")
    try:
        if _is_special(path):
            with open(path, "wb") as file:
                file.write(data)
            return
        target = Path(os.path.realpath(path))
        beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            beside.write_bytes(data)
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:  # by the name that was asked for
        raise OSError(error.errno, error.strerror, str(path)) from None


def _is_special(path: str | Path) -> bool:
    """Whether there is something that is neither a file nor a folder."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def section(name: str, title: str, meaning: str, *body: str) -> str:
    """A section under a heading, with what its numbers mean."""
    return (
        f'<section aria-labelledby="{name}"><h2 id="{name}">{text(title)}</h2>'
        f'<p class="meaning">{text(meaning, 2000)}</p>{"".join(body)}</section>'
    )


def _unseen(words: str) -> str:
    """For those who listen; the others see what it means."""
    return f'<span class="unseen">{text(words[1:-1])}</span>'


def table(
    label: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    words: Sequence[int] = (0,),
    wide: Sequence[int] = (),
    long: Sequence[int] = (),
    here: Sequence[bool] = (),
) -> str:
    """A table of HTML cells whose first column heads its rows.

    A column whose name stands in brackets shows none, but says it. `words`: columns of words (to the left);
    `wide`: those that a phone leaves out; `long`: those that wrap; `here`: rows to be set off.
    """

    def kind(column: int) -> str:
        names = [name for name, of in (("words", words), ("wide", wide), ("long", long)) if column in of]
        return f' class="{" ".join(names)}"' if names else ""

    head = "".join(
        f'<th scope="col"{kind(n)}>{text(name) if name[:1] != "(" else _unseen(name)}</th>'
        for n, name in enumerate(columns)
    )
    lines = []
    for number, row in enumerate(rows):
        cells = "".join(
            f'<th scope="row"{kind(0)}>{cell}</th>' if n == 0 else f"<td{kind(n)}>{cell}</td>"
            for n, cell in enumerate(row)
        )
        is_here = number < len(here) and here[number]
        opening = '<tr class="here">' if is_here else "<tr>"
        lines.append(f"{opening}{cells}</tr>")
    return (
        f'<div class="scroll" role="region" aria-label="Table: {text(label)}" tabindex="0"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )
