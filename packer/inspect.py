"""One pack, decoded: where sequences begin, which tokens are trained, where each came from.

Text is decoded run by run (a stretch of trained or masked tokens), not token by token, so that a
character made of several tokens stays whole; a run that ends inside one shows U+FFFD there. Special
tokens are shown and marked, so that they differ from text that spells the same. What a data set wrote is
never taken for markup or for terminal commands.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from padless.packer.errors import InputError
from padless.packer.meanings import counted
from padless.runtime.format import IGNORE_INDEX, PadlessError, check_file, length_of_pack
from padless.runtime.reader import Pack, PackedReader

if TYPE_CHECKING:
    from rich.console import Console
    from tokenizers import Tokenizer

Decode = Callable[[list[int]], tuple[str, list[list[int]]]]
_TABLE_COLUMNS = ("record", "source", "row", "part", "status", "start")
_TRAINED, _MASKED, _SPECIAL = "bold green", "dim", " reverse"


def describe_pack(
    path: str | Path, index: int, *, split: str | None = None, plan: str | None = None
) -> dict[str, Any]:
    """Pack number `index` (negative: from the end) as plain data for `inspect --json`.

    A segment's `special` are the places of special tokens in its text, [first character, end] each.

    Raises InputError where there is no such pack, and what opening a folder raises.
    """
    reader = PackedReader(path, split=split, plan=plan)
    if not -len(reader) <= index < len(reader):
        holds = f"holds packs 0 to {len(reader) - 1}" if len(reader) else "holds no packs"
        raise InputError(f"there is no pack {index}: {reader.location} {holds}")
    pack = reader[index]
    table = reader.sequence_table(_TABLE_COLUMNS)
    decode = _decoder(folder_tokenizer(reader))
    rule = reader.manifest.options.get("image_rule")
    image = rule.get("token_id") if isinstance(rule, dict) else None
    sequences: list[dict[str, Any]] = []
    starts = _starts(reader, index % len(reader), len(pack.seq_lengths))
    offset = 0
    for sequence_id, length in zip(pack.sequence_ids.tolist(), pack.seq_lengths.tolist(), strict=True):
        if not 0 <= sequence_id < table.num_rows:
            raise InputError(
                f"pack {index} names sequence {sequence_id}, the sequence table has "
                f"{table.num_rows} lines: run pack-dataset verify {reader.location}"
            )
        line = {name: table.column(name)[sequence_id].as_py() for name in _TABLE_COLUMNS}
        segments = _segments(pack, offset, length, decode, image)
        extras = {
            name: pack.extras[name].tolist()[len(sequences)]
            for name, level in pack.extra_levels.items()
            if level == "sequence"
        }
        sequences.append(
            {
                "sequence_id": sequence_id,
                **line,
                "start": line["start"] + starts[len(sequences)],
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
        "max_length": length_of_pack(reader.buckets, index % len(reader)),
        "num_tokens": pack.num_tokens,
        "num_targets": pack.num_targets,
        "sequences": sequences,
    }


def _starts(reader: PackedReader, number: int, sequences: int) -> list[int]:
    """Where in its stored sequence each one of a pack begins: not at 0 where a plan cuts it."""
    if reader.plan is None or reader.plan.starts is None:
        return [0] * sequences
    first = int(reader.plan.offsets[number])
    found: list[int] = reader.plan.starts[first : first + sequences].tolist()
    return found


def print_pack(pack: dict[str, Any], console: Console) -> None:
    """Print what `describe_pack` gave: trained tokens in colour, a rule before each sequence."""
    from rich.rule import Rule
    from rich.text import Text

    console.print(
        Text(
            f"pack {pack['pack']} of {pack['packs']}: {counted(len(pack['sequences']), 'sequence')}, "
            f"{pack['num_tokens']:,} of {pack['max_length']:,} tokens, {pack['num_targets']:,} trained"
        )
    )
    special = ("special token", _SPECIAL.strip())
    console.print(Text.assemble(("trained", _TRAINED), "  ", ("masked", _MASKED), "  ", special))
    for sequence in pack["sequences"]:
        last = sequence["offset"] + sequence["length"] - 1
        part = f" part {sequence['part']}" if sequence["part"] else ""
        part += f" from its token {sequence['start']}" if sequence["start"] else ""
        status = "" if sequence["status"] == "whole" else f" ({sequence['status']})"
        title = (
            f"{visible(sequence['source'])} row {sequence['row']}{part}{status}, "
            f"sequence {sequence['sequence_id']}, tokens {sequence['offset']:,} to {last:,}, "
            f"{sequence['num_targets']:,} trained"
            + "".join(f", {name} {value}" for name, value in sequence["extras"].items())
        )
        heading = Text(title)
        if heading.cell_len + 2 > console.width:  # a rule would cut its title
            console.print(Rule(style="dim"), heading)
        else:
            console.print(Rule(heading, align="left", style="dim"))
        body = Text()
        for run in sequence["segments"]:
            style = _TRAINED if run["trained"] else _MASKED
            for text, is_special in pieces(run):
                body.append(visible(text), style=style + _SPECIAL * is_special)
        console.print(body)


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


def pieces(run: dict[str, Any], begin: int = 0, end: int | None = None) -> Iterator[tuple[str, bool]]:
    """A run's text from character `begin` to `end`, in pieces: (text, whether it is a special token)."""
    text, at = run["text"][:end], begin
    for first, last in run["special"]:
        first, last = max(first, at), min(last, len(text))
        if first < last:
            if at < first:
                yield text[at:first], False
            yield text[first:last], True
            at = last
    if at < len(text):
        yield text[at:], False


def _segments(
    pack: Pack, offset: int, length: int, decode: Decode, image: int | None
) -> list[dict[str, Any]]:
    """The sequence in runs of trained or masked tokens, decoded; of an image (`image`) one placeholder."""
    ids = pack.input_ids[offset : offset + length]
    trained = pack.labels[offset : offset + length] != IGNORE_INDEX
    cuts = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), length]
    found = []
    for start, stop in zip(cuts, cuts[1:], strict=False):
        some = ids[start:stop]
        if image is not None:
            some = some[np.append(True, (some[1:] != image) | (some[:-1] != image))]
        text, special = decode(some.tolist())
        found.append(
            {"text": text, "special": special, "trained": bool(trained[start]), "tokens": stop - start}
        )
    return found


def _decoder(tokenizer: Tokenizer | None) -> Decode:
    """Ids to their text, and where in it (first character, end) special tokens stand."""
    if tokenizer is None:
        return lambda ids: (" ".join(map(str, ids)), [])
    added = tokenizer.get_added_tokens_decoder()
    names = {number: token.content for number, token in added.items() if token.special}

    def decode(ids: list[int]) -> tuple[str, list[list[int]]]:
        whole: str = tokenizer.decode(ids, skip_special_tokens=False)
        places = [place for place, number in enumerate(ids) if number in names]
        found, at = [], 0
        begins = [0, *(place + 1 for place in places)]
        for begin, place in zip(begins, places, strict=False):
            name = names[ids[place]]
            between = tokenizer.decode(ids[begin:place], skip_special_tokens=False)
            first = at + len(between)
            if not whole.startswith(name, first):  # pieces and the whole differ in a space
                first = whole.find(name, at)
            if first < 0:
                continue
            at = first + len(name)
            found.append([first, at])
        return whole, found

    return decode


def folder_tokenizer(reader: PackedReader) -> Tokenizer | None:
    """The folder's own tokenizer; None where ready-made tokens came without one."""
    name = "tokenizer/tokenizer.json"
    info = next((file for file in reader.manifest.tokenizer_files if file.file == name), None)
    if info is None:
        return None
    from tokenizers import Tokenizer

    def load(path: Path) -> Tokenizer:
        if reader.remote is None:
            check_file(path, info.bytes, info.checksum)
        return Tokenizer.from_file(str(path))

    try:
        return load(reader.path / name) if reader.remote is None else reader.remote.open_file(info, load)
    except PadlessError:
        raise
    except Exception as problem:  # tokenizers raises nothing narrower
        raise InputError(
            f"{reader.location}/{name} cannot be loaded ({problem}): run pack-dataset verify"
        ) from None
