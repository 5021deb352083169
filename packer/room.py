"""How much room a build still needs, for whoever was told that the disk is full.

The write that failed knows its own bytes, four of them perhaps; what helps is the sum for the rest of the
build. Shards are known before they are written (compressed ones take less); while chunks are tokenized the
rest is as large, by byte of the source, as what is done.
"""

from __future__ import annotations

import shutil

import numpy as np

from padless.packer.buckets import BUCKETS_FROM
from padless.packer.errors import DiskFullError, disk_full_message
from padless.packer.identity import Identity
from padless.packer.lines import LINE
from padless.packer.plan import PackPlan
from padless.packer.tables import SplitLines
from padless.packer.token_store import ChunkStore
from padless.packer.tokenizer_files import TokenizerFiles
from padless.packer.write import Layout

_TABLE_LINE = 24
"""Bytes of a line of the sequence table, about: most of its columns nearly vanish."""
_SMALL_FILES = 2**16
"""dataset_info.json, state.json, the manifest."""


def needed_from_chunks(identity: Identity, store: ChunkStore) -> int:
    """Bytes for the chunks that are not done, and for the shards of all: an estimate."""
    entries = store.entries.values()
    total = sum(file.size for file in identity.files)
    done = sum(entry.size for entry in entries)
    tokens, lines = sum(entry.tokens for entry in entries), sum(entry.lines for entry in entries)
    if not done:  # four bytes a token, four letters a token
        done, tokens, lines = 4, 1, 0
    left = max(total - done, 0) / done
    stored = left * (tokens * 4 + lines * LINE.itemsize)
    shards = (1 + left) * (tokens * 8 + lines * _TABLE_LINE)
    return int(stored + shards) + _tokenizer_bytes(identity.tokenizer)


def needed_for_shards(
    tokenizer: TokenizerFiles, layout: Layout, plans: list[PackPlan], lines: list[SplitLines], kept: int
) -> int:
    """Bytes of the shards, tables and tokenizers of all splits, without the `kept` bytes that are there."""
    found = 0
    for plan, split in zip(plans, lines, strict=True):
        if split.tokens >= BUCKETS_FROM:
            found += split.tokens * 4
        tokens = np.array([split.tokens])
        found += int(layout.pack_bytes(tokens, np.array([len(plan.order)]))[0]) + 36 * len(plan)
        found += len(split.lengths) * _TABLE_LINE + _tokenizer_bytes(tokenizer) + _SMALL_FILES
    return max(found - kept, 0)


def with_room(error: DiskFullError, needed: int, folder: str) -> DiskFullError:
    """The same error, its bytes those that are missing for the rest of the build."""
    missing = max(needed - shutil.disk_usage(folder).free, error.missing)
    return DiskFullError(disk_full_message(error.path or folder, missing))


def _tokenizer_bytes(tokenizer: TokenizerFiles) -> int:
    return sum(len(content) for content in tokenizer.contents.values())
