"""Packs as a page: text with its boundaries, trained tokens in colour, where each sequence came from.

Long sequences are cut in the middle, so that the page stays below 5 MB whatever is in the packs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from padless.packer.charts import key, strip
from padless.packer.inspect import pieces
from padless.packer.meanings import counted
from padless.packer.page import page, text

_CHARACTERS = 400_000
"""Of all packs together; one may become a dozen bytes as an escape."""
_LEAST = 200


def inspect_page(packs: Sequence[dict[str, Any]]) -> str:
    """The page of what `describe_pack` gave for each pack."""
    runs = sum(len(sequence["segments"]) for pack in packs for sequence in pack["sequences"])
    each = max(_LEAST, _CHARACTERS // max(1, runs))
    numbers = ", ".join(f"{pack['pack']:,}" for pack in packs[:8]) + (", ..." if len(packs) > 8 else "")
    word = "Pack" if len(packs) == 1 else "Packs"
    body = [
        f'<header><p class="quiet">of {packs[0]["packs"]:,} in this folder</p><h1>{word} {numbers}</h1>'
        + key([("now", "trained"), ("third", "masked: context, not trained")])
        + '<p class="quiet"><b class="special">Special tokens</b> are underlined; text that spells the same '
        "is not.</p>" + "</header>"
    ]
    left = _CHARACTERS // _LEAST
    for pack in packs:
        body.append(_pack(pack, each, left))
        left = max(0, left - sum(len(sequence["segments"]) for sequence in pack["sequences"]))
    return page(f"{word} {numbers}", body, '<p class="quiet">Made by pack-dataset inspect.</p>')


def _pack(pack: dict[str, Any], each: int, most: int) -> str:
    """A section; `each` run of at most so many characters, at `most` so many runs."""
    whole = pack["max_length"]
    trained = pack["num_targets"] / whole
    label = f"{pack['num_tokens']:,} of {whole:,} tokens, {pack['num_targets']:,} trained"
    name = f"pack-{pack['pack']}"
    found = [
        f'<section aria-labelledby="{name}"><h2 id="{name}">Pack {pack["pack"]:,}</h2>'
        f'<p class="meaning">{counted(len(pack["sequences"]), "sequence")}, {label}</p>',
        strip([("now", trained), ("third", pack["num_tokens"] / whole - trained)], label),
    ]
    for sequence in pack["sequences"]:
        if most <= 0:
            found.append('<p class="quiet">… and more sequences, for which this page has no room.</p>')
            break
        most -= len(sequence["segments"])
        end = sequence["offset"] + sequence["length"]
        facts = [
            f"{sequence['source']} row {sequence['row']:,}"
            + (f" part {sequence['part']}" if sequence["part"] else ""),
            f"sequence {sequence['sequence_id']:,}",
            f"tokens {sequence['offset']:,} to {end - 1:,}",
            f"{sequence['num_targets']:,} trained",
            *([sequence["status"]] if sequence["status"] != "whole" else ()),
            *(f"{name} {value}" for name, value in sequence["extras"].items()),
        ]
        runs = "".join(_run(run, each) for run in sequence["segments"][: _CHARACTERS // _LEAST])
        found.append(f'<p class="quiet">{text(" · ".join(facts))}</p><pre tabindex="0">{runs}</pre>')
    return "".join(found) + "</section>"


def _run(run: dict[str, Any], each: int) -> str:
    """A run with its special tokens marked, cut in its middle to `each` characters."""
    whole, tail = len(run["text"]), each // 3
    parts = [pieces(run)] if whole <= each else [pieces(run, 0, each - tail), pieces(run, whole - tail)]
    inside = " … ".join(
        "".join(
            f"<b>{text(content, each)}</b>" if is_special else text(content, each)
            for content, is_special in part
        )
        for part in parts
    )
    return f"<mark>{inside}</mark>" if run["trained"] else f'<span class="masked">{inside}</span>'
