"""One pack, decoded: where sequences begin, which tokens are trained, where each came from.

Text is decoded run by run (a stretch of trained or masked tokens), not token by token, so that a
character made of several tokens stays whole; a run that ends inside one shows U+FFFD there. Special
tokens are shown. What a data set wrote is never taken for markup or for terminal commands.
"""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from padless.packer.errors import InputError
from padless.runtime.format import IGNORE_INDEX, PadlessError
from padless.runtime.reader import Array, Pack, PackedReader

if TYPE_CHECKING:
    from rich.console import Console
    from tokenizers import Tokenizer

_TABLE_COLUMNS = ("record", "source", "row", "part", "status")
_TRAINED, _MASKED = "bold green", "dim"


def describe_pack(
    path: str | Path, index: int, *, split: str | None = None, plan: str | None = None
) -> dict[str, Any]:
    """Pack number `index` (negative: from the end) as plain data for `inspect --json`.

    Raises InputError where there is no such pack, and what opening a folder raises.
    """
    reader = PackedReader(path, split=split, plan=plan)
    if not -len(reader) <= index < len(reader):
        holds = f"holds packs 0 to {len(reader) - 1}" if len(reader) else "holds no packs"
        raise InputError(f"there is no pack {index}: {reader.location} {holds}")
    pack = reader[index]
    table = reader.sequence_table(_TABLE_COLUMNS)
    tokenizer = folder_tokenizer(reader)
    sequences: list[dict[str, Any]] = []
    offset = 0
    for sequence_id, length in zip(pack.sequence_ids.tolist(), pack.seq_lengths.tolist(), strict=True):
        if not 0 <= sequence_id < table.num_rows:
            raise InputError(
                f"pack {index} names sequence {sequence_id}, the sequence table has "
                f"{table.num_rows} lines: run pack-dataset verify {reader.location}"
            )
        line = {name: table.column(name)[sequence_id].as_py() for name in _TABLE_COLUMNS}
        segments = _segments(pack, offset, length, tokenizer)
        extras = {
            name: pack.extras[name].tolist()[len(sequences)]
            for name, level in pack.extra_levels.items()
            if level == "sequence"
        }
        sequences.append(
            {
                "sequence_id": sequence_id,
                **line,
                "source": reader.manifest.sources[line["source"]].path,
                "offset": offset,
                "length": length,
                "extras": extras,
                "num_targets": sum(run["tokens"] for run in segments if run["trained"]),
                "text": "".join(run["text"] for run in segments),
                "segments": segments,
            }
        )
        offset += length
    return {
        "pack": index % len(reader),
        "packs": len(reader),
        "max_length": reader.manifest.statistics["max_length"],
        "num_tokens": pack.num_tokens,
        "num_targets": pack.num_targets,
        "sequences": sequences,
    }


def print_pack(pack: dict[str, Any], console: Console) -> None:
    """Print what `describe_pack` gave: trained tokens in colour, a rule before each sequence."""
    from rich.rule import Rule
    from rich.text import Text

    console.print(
        Text(
            f"pack {pack['pack']} of {pack['packs']}: {len(pack['sequences'])} sequences, "
            f"{pack['num_tokens']} of {pack['max_length']} tokens, {pack['num_targets']} trained"
        )
    )
    console.print(Text.assemble(("trained", _TRAINED), "  ", ("masked", _MASKED)))
    for sequence in pack["sequences"]:
        end = sequence["offset"] + sequence["length"]
        part = f" part {sequence['part']}" if sequence["part"] else ""
        status = "" if sequence["status"] == "whole" else f" ({sequence['status']})"
        title = (
            f"{visible(sequence['source'])} row {sequence['row']}{part}{status}, "
            f"tokens {sequence['offset']}-{end}, {sequence['num_targets']} trained"
            + "".join(f", {name} {value}" for name, value in sequence["extras"].items())
        )
        console.print(Rule(Text(title), align="left"))
        body = Text()
        for run in sequence["segments"]:
            body.append(visible(run["text"]), style=_TRAINED if run["trained"] else _MASKED)
        console.print(body)


def browse_packs(
    path: str | Path,
    pack: dict[str, Any],
    console: Console,
    *,
    split: str | None = None,
    plan: str | None = None,
) -> None:
    """Ask where to go from a pack, until `q` or the end of the input; at either end it stays."""
    number, count = pack["pack"], pack["packs"]
    while True:
        try:
            word = console.input("n next, p previous, a number, q quit: ").strip()
        except EOFError:
            return
        if word == "q":
            return
        steps = {"n": number + 1, "": number + 1, "p": number - 1}
        wanted = int(word) if word.isdecimal() else steps.get(word, -1)
        if not 0 <= wanted < count:
            console.print(f"there are packs 0 to {count - 1}; this is {number}")
            continue
        number = wanted
        print_pack(describe_pack(path, number, split=split, plan=plan), console)


def visible(text: str) -> str:
    r"""The text with control and direction characters as escapes (\x1b, \u202e), newlines kept.

    A terminal would obey the former, and the latter reorder what a reader sees. The joiners that
    Indic scripts, Persian and emoji are written with stay.
    """
    return "".join(
        char
        if char in "\n\u200c\u200d" or unicodedata.category(char) not in ("Cc", "Cf", "Cs")
        else char.encode("unicode_escape").decode()
        for char in text
    )


def _segments(pack: Pack, offset: int, length: int, tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    """The sequence in runs of trained or masked tokens, decoded."""
    ids = pack.input_ids[offset : offset + length]
    trained = pack.labels[offset : offset + length] != IGNORE_INDEX
    cuts = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), length]
    return [
        {
            "text": _decode(ids[start:stop], tokenizer),
            "trained": bool(trained[start]),
            "tokens": stop - start,
        }
        for start, stop in zip(cuts, cuts[1:], strict=False)
    ]


def _decode(ids: Array, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return " ".join(map(str, ids.tolist()))
    return tokenizer.decode(ids.tolist(), skip_special_tokens=False)


def folder_tokenizer(reader: PackedReader) -> Tokenizer | None:
    """The folder's own tokenizer; None where ready-made tokens came without one."""
    name = "tokenizer/tokenizer.json"
    info = next((file for file in reader.manifest.tokenizer_files if file.file == name), None)
    if info is None:
        return None
    from tokenizers import Tokenizer

    def load(path: Path) -> Tokenizer:
        return Tokenizer.from_file(str(path))

    try:
        return load(reader.path / name) if reader.remote is None else reader.remote.open_file(info, load)
    except PadlessError:
        raise
    except Exception as problem:  # tokenizers raises nothing narrower
        raise InputError(
            f"{reader.location}/{name} cannot be loaded ({problem}): run pack-dataset verify"
        ) from None
