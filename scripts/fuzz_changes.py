"""How `fuzz_folder` changes a file: bytes anywhere, numbers where formats keep them, JSON leaf by leaf."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31 - 1, 2**31, 2**60, 2**63, -(2**63), 2**64, 10**400, 1.5, 1e308),
    *(
        "",
        ".",
        "..",
        "/",
        "../x",
        "/etc/passwd",
        "a/b",
        "C:\\x",
        "\x00",
        "\ud800",
        "x" * 100_000,
        "list<int32>",
    ),
    *(
        "../outside/manifest.json",
        "tokenizer/../../outside/manifest.json",
        "plans/other.parquet",
        "manifest.json",
    ),
    *([], {}, [[]], [[0, 0]], [[-1, 1]], [[0, 2**62]], {"a": 1}, "xxh3:" + "0" * 32, "list<list<int8>>"),
    *("list<fixed_size_list<float32, 999999>>", "pack", "token", "splits"),
)


def flip(data: bytearray, chance: random.Random) -> bytearray:
    for _ in range(chance.choice((1, 1, 2, 8))):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return data


def number(data: bytearray, chance: random.Random) -> bytearray:
    """A 4- or 8-byte number at an aligned place becomes an extreme one."""
    width = chance.choice((4, 8))
    at = chance.randrange(max(len(data) // width, 1)) * width
    value = chance.choice((0, 1, -1, 2**31 - 1, -(2**31), 2**15, 2**16, 255, chance.randrange(2**31)))
    value = chance.choice((value, 2**62)) if width == 8 else value
    data[at : at + width] = value.to_bytes(width, "little", signed=True)
    return data


def head_or_tail(data: bytearray, chance: random.Random) -> bytearray:
    """Bytes where formats keep their lengths."""
    at = chance.choice((chance.randrange(min(1024, len(data))), -1 - chance.randrange(min(1024, len(data)))))
    data[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
    return data


def cut(data: bytearray, chance: random.Random) -> bytearray:
    return data[: chance.randrange(len(data))]


def grow(data: bytearray, chance: random.Random) -> bytearray:
    at = chance.randrange(len(data) + 1)
    data[at:at] = chance.choice((bytes(chance.randrange(1, 64)), chance.randbytes(8), data[: at // 2]))
    return data


def move(data: bytearray, chance: random.Random) -> bytearray:
    """A piece is copied to another place, zeroed, or left out."""
    size = chance.randrange(1, min(256, len(data)))
    here, there = chance.randrange(len(data) - size), chance.randrange(len(data) - size)
    what = chance.randrange(3)
    data[here : here + size] = data[there : there + size] if what == 0 else bytes(size) if what == 1 else b""
    return data


def edit(data: bytearray, chance: random.Random) -> bytearray:
    """JSON: leaves replaced, keys left out, items doubled or swapped."""
    content = json.loads(data)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        places = list(_places(content))
        if not places:
            break
        holder, key = chance.choice(places)
        what = chance.randrange(6)
        if what == 0:
            del holder[key]
        elif what == 1 and isinstance(holder, list):
            holder.insert(key, holder[key])
        elif what == 2 and isinstance(holder, list):
            chance.shuffle(holder)
        elif what == 3 and isinstance(holder[key], int):
            holder[key] += chance.choice((-1, 1, 8, -8, 2**32))
        else:
            holder[key] = copy.deepcopy(chance.choice(HOSTILE))
    return bytearray(json.dumps(content).encode("utf-8", "backslashreplace"))


def deepen(data: bytearray, chance: random.Random) -> bytearray:
    """Brackets without end, where a parser calls itself."""
    at = chance.randrange(len(data))
    data[at:at] = chance.choice((b"[", b'{"a":')) * 200_000
    return data


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    items = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in items:
        yield content, key
        if isinstance(value, (dict, list)):
            yield from _places(value)


Change = Callable[[bytearray, random.Random], bytearray]
BINARY: tuple[Change, ...] = (flip, flip, number, number, head_or_tail, cut, grow, move)
JSON: tuple[Change, ...] = (edit, edit, edit, edit, edit, flip, cut, grow, move, deepen)
