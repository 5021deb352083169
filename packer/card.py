"""The data set card: README.md in a packed folder, so that the Hub shows and loads it as it is.

Its metadata block names the shards of each split (`configs`), which is all that `load_dataset` needs after
`hf upload ORG/NAME packed . --repo-type=dataset`. It lies outside the manifest's checksums; one of somebody
else, or that somebody edited (a checksum in it tells), is left alone. What it tells of sources are their
names below the common folder, as in the manifest.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from padless.packer.durable import write_bytes
from padless.packer.errors import InputError
from padless.packer.inspect import visible
from padless.packer.report import build_report
from padless.packer.report_view import lengths_of
from padless.runtime.format import Manifest, checksum_bytes, load_manifest

_OURS = b"<!-- written by pack-dataset report --card -->"
_SEAL = re.compile(rb"<!-- written by pack-dataset report --card, [^ ]+ -->")
_SIZES = (
    (10**3, "n<1K"),
    (10**4, "1K<n<10K"),
    (10**5, "10K<n<100K"),
    (10**6, "100K<n<1M"),
    (10**7, "1M<n<10M"),
)
_LARGER = "n>10M"
_SOURCES = 20
_LONGEST = 120


def write_card(path: str | Path) -> Path:
    """Write README.md into a packed folder or a folder of splits, and say where.

    Raises InputError where there is a README.md that is not ours as we wrote it, and what opening a folder
    raises.
    """
    folder = Path(path)
    manifest = load_manifest(folder)
    names: list[str | None] = [None] if isinstance(manifest, Manifest) else list(manifest.names)
    file = folder / "README.md"
    if not has_room_for_card(folder):
        raise InputError(
            f"{file} was not written by pack-dataset, or was changed since: move it away, or add to it by "
            "hand"
        )
    reports = {name: build_report(folder, split=name) for name in names}
    card = card_of(reports).encode("utf-8", "backslashreplace")
    write_bytes(str(folder), file.name, card.replace(_OURS, _sealed(card), 1))
    return file


def has_room_for_card(folder: Path) -> bool:
    """Whether there is no README.md, or one that nobody touched since we wrote it."""
    try:
        there = (folder / "README.md").read_bytes()
    except FileNotFoundError:
        return True
    seal = _SEAL.search(there)
    return seal is not None and seal[0] == _sealed(there.replace(seal[0], _OURS, 1))


def _sealed(card: bytes) -> bytes:
    """The mark with the checksum of the card, by which a card that was edited is told."""
    return _OURS.replace(b" -->", b", " + checksum_bytes(card).encode() + b" -->")


def card_of(reports: dict[str | None, dict[str, Any]]) -> str:
    """The card's text, from the report of each split (None: the folder's only one)."""
    packs = sum(report["packs"] for report in reports.values())
    files = [
        {"split": name or "train", "path": f"{name}/shard-*.arrow" if name else "shard-*.arrow"}
        for name in reports
    ]
    metadata = {
        "configs": [{"config_name": "default", "data_files": files}],
        "size_categories": [next((word for most, word in _SIZES if packs < most), _LARGER)],
        "tags": ["padless", "packed", "language-modeling"],
    }
    lines = [
        "---",
        yaml.safe_dump(metadata, sort_keys=False).rstrip(),
        "---",
        _OURS.decode(),
        "",
        "# Packed sequences",
        "",
    ]
    lines += [
        "Tokenized sequences in packs, without padding: a row is a pack, `seq_lengths` says where its "
        "sequences end, `labels` are -100 where a token is not trained. Attention must stay inside each "
        "sequence.",
        "",
        "| split | packs | of tokens | sequences | tokens | trained | useful share | before, in batches of "
        "8 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, report in reports.items():
        trained = report["tokens_by_fate"]["trained"] / max(1, report["tokens"])
        before = 1 - report["padding"]["random"]["8"]
        lines.append(
            f"| {name or 'train'} | {report['packs']:,} | {lengths_of(report)} | "
            f"{report['sequences']:,} | {report['tokens']:,} | {trained:.1%} | {report['utilization']:.2%} "
            f"| {before:.1%} |"
        )
    lines += ["", "| source | split | records | dropped | tokens |", "|---|---|---|---|---|"]
    for name, report in reports.items():
        sources = sorted(report["by_source"], key=lambda source: -source["tokens"])
        for source in sources[:_SOURCES]:
            lines.append(
                f"| {_cell(source['source'])} | {name or 'train'} | {source['records']:,} | "
                f"{source['dropped']:,} | {source['tokens']:,} |"
            )
        if len(sources) > _SOURCES:
            lines.append(f"| and {len(sources) - _SOURCES:,} more | {name or 'train'} | | | |")
    lines += [
        "",
        "```python",
        "from datasets import load_dataset",
        "",
        'packs = load_dataset("ORG/NAME")',
        "```",
        "",
    ]
    return "\n".join(lines)


def _cell(words: str) -> str:
    """Somebody's words in a table of Markdown: no markup, one line."""
    shown = visible(words[:_LONGEST]).replace("\n", " ")
    return "".join(f"&#{ord(char)};" if char in "|<>`*_[]&\\" else char for char in shown)
