"""One split's folder, written in the order that makes the manifest the commit point."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from padless.packer.advice import FLASH_ROWS
from padless.packer.bounds import facts_of_buckets
from padless.packer.buckets import BUCKETS_FROM, near
from padless.packer.durable import recycled_blocks, sync_folder, write_bytes
from padless.packer.engine import Engine
from padless.packer.extra_columns import group_column, groups_of
from padless.packer.gather import Gather
from padless.packer.hf_folder import dataset_info, state
from padless.packer.identity import version_of
from padless.packer.kept_shards import KeptShards
from padless.packer.plan import PackPlan, most_rows, plan_hash
from padless.packer.table_writer import ColumnPiece, Piece, Places, write_table
from padless.packer.tables import SplitLines
from padless.packer.tokenizer_files import TokenizerFiles
from padless.packer.write import Layout, cut_shards
from padless.runtime.format import (
    MANIFEST,
    FileInfo,
    Manifest,
    ShardInfo,
    SourceInfo,
    SplitInfo,
    SplitsManifest,
    TableInfo,
    checksum_file,
    parse_type,
    shard_columns,
)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What all splits of a build share."""

    options: dict[str, Any]
    seed: int
    max_length: int
    cap: int
    align: int
    tokenizer: TokenizerFiles
    vocab_size: int
    largest_id: int
    template: str | None
    template_checksum: str | None
    sources: tuple[SourceInfo, ...]


def near_shards(
    output: str,
    split: str,
    plan: PackPlan,
    lines: SplitLines,
    gather: Gather,
    layout: Layout,
    kept: KeptShards,
) -> Gather:
    """The gather, over buckets for the shards that are still to be written where its store is large."""
    if lines.tokens < BUCKETS_FROM:
        return gather
    cuts = cut_shards(plan, lines.lengths, layout)
    left = [batch for n, shard in enumerate(cuts) if kept.find(split, n) is None for batch in shard]
    return near(gather, plan, left, output)


def write_shards(
    output: str,
    split: str,
    plan: PackPlan,
    lines: SplitLines,
    gather: Gather,
    layout: Layout,
    engine: Engine,
    report: Callable[[int], None],
    kept: KeptShards,
) -> tuple[ShardInfo, ...]:
    """All shards of a split, those that an earlier run finished taken over."""
    folder = os.path.join(output, split) if split else output
    os.makedirs(folder, exist_ok=True)
    cuts = cut_shards(plan, lines.lengths, layout)
    writers, write = engine.shard_writer(folder, cuts, plan, gather, layout, report)

    def finished(number: int, batches: list[tuple[int, int]]) -> ShardInfo:
        info = kept.find(split, number)
        if info is None:
            info = write(number, batches)
            kept.add(split, number, info)
        else:
            report(info.tokens)
        return info

    with recycled_blocks(), ThreadPoolExecutor(writers) as pool:
        futures = [pool.submit(finished, number, batches) for number, batches in enumerate(cuts)]
        try:
            return tuple(future.result() for future in futures)
        except BaseException:
            for future in futures:
                future.cancel()
            engine.cancel()
            raise


class Beside(NamedTuple):
    """What can be written before or beside the shards, and what can be worked out then."""

    tables: tuple[TableInfo, ...]
    tokenizer_files: tuple[FileInfo, ...]
    plan_hash: str
    statistics: dict[str, Any]


def write_beside(
    folder: str,
    pieces: Iterator[Piece | ColumnPiece],
    plan: PackPlan,
    lines: SplitLines,
    facts: Facts,
    strategy: str,
) -> Beside:
    """The sequence table, from its pieces, and the tokenizer of one split; what the manifest says of it."""
    os.makedirs(folder, exist_ok=True)

    def rest() -> tuple[tuple[FileInfo, ...], str, dict[str, Any]]:
        _ = facts.tokenizer.fingerprint  # worked out here, beside the shards
        return (
            _write_tokenizer(folder, facts),
            plan_hash(plan, lines.lengths, facts.max_length),
            _statistics(plan, lines, facts, strategy),
        )

    with ThreadPoolExecutor(1) as other:  # small files wait for the disk most of the time
        late = other.submit(rest)
        tables = write_table(folder, pieces, lines.lines, Places(plan, lines.lengths))
        return Beside(tables, *late.result())


def write_rest(
    folder: str,
    name: str,
    lines: SplitLines,
    layout: Layout,
    shards: tuple[ShardInfo, ...],
    beside: Beside,
    facts: Facts,
    strategy: str,
) -> Manifest:
    """What makes the split a data set: the manifest last."""
    columns = shard_columns(layout.id_type, labels=layout.labels, extras=layout.extras)
    write_bytes(folder, "dataset_info.json", dataset_info({c.name: parse_type(c.type) for c in columns}))
    write_bytes(folder, "state.json", state([shard.file for shard in shards], beside.plan_hash, name))
    manifest = Manifest(
        shards=shards,
        sequence_tables=beside.tables,
        tokenizer_files=beside.tokenizer_files,
        tokenizer_fingerprint=facts.tokenizer.fingerprint,
        vocab_size=facts.vocab_size,
        largest_id=facts.largest_id,
        chat_template_checksum=facts.template_checksum,
        columns=columns,
        options={
            **facts.options,
            "packed_with": strategy,
            **_grouped(lines),
        },
        sources=tuple(
            replace(s, records=records)
            for s, records in zip(facts.sources, lines.records_by_source, strict=True)
        ),
        seed=facts.seed,
        statistics=beside.statistics,
        plan_hash=beside.plan_hash,
        padless_version=version_of("padless"),
        pyarrow_version=version_of("pyarrow"),
    )
    sync_folder(folder)
    write_bytes(folder, MANIFEST, manifest.to_json())
    sync_folder(folder)
    return manifest


def _planned(lines: SplitLines, strategy: str) -> dict[str, Any]:
    """Options that are each split's own."""
    return {"packed_with": strategy, **_grouped(lines)}


def _grouped(lines: SplitLines) -> dict[str, str]:
    """The column whose sequences share packs, where there is one."""
    name = group_column(lines.extras)
    return {} if name is None else {"grouped_by": name}


def _statistics(plan: PackPlan, lines: SplitLines, facts: Facts, strategy: str) -> dict[str, Any]:
    tokens = lines.tokens
    buckets = facts_of_buckets(
        plan,
        lines.lengths,
        max_length=facts.max_length,
        cap=facts.cap,
        align=facts.align,
        strategy=strategy,
        groups=groups_of(lines.extras, len(lines.lengths)),
    )
    return {
        "max_length": facts.max_length,
        **({"buckets": buckets} if plan.buckets is not None else {}),
        "records": lines.records,
        "by_source": lines.by_source,
        "dropped_by_reason": lines.dropped_by_reason,
        "sequences": len(lines.lengths),
        "packs": len(plan),
        "bound_packs": sum(bucket["bound_packs"] for bucket in buckets),
        "tokens": tokens,
        "trained_tokens": lines.trained,
        "masked_tokens": tokens - lines.trained,
        "cut_tokens": sum(lines.cut_by_reason.values()),
        "cut_by_reason": lines.cut_by_reason,
        "empty_replies": lines.empty_replies,
        "flash_attention_2_rows": most_rows(plan, lines.lengths, FLASH_ROWS),
    }


def _write_tokenizer(folder: str, facts: Facts) -> tuple[FileInfo, ...]:
    """The tokenizer's files, with the chat template as it was used."""
    os.makedirs(os.path.join(folder, "tokenizer"), exist_ok=True)
    contents = dict(facts.tokenizer.contents)
    if facts.template is not None:
        contents["chat_template.jinja"] = facts.template.encode("utf-8")
    written = [write_bytes(folder, f"tokenizer/{name}", contents[name]) for name in sorted(contents)]
    sync_folder(os.path.join(folder, "tokenizer"))
    return tuple(written)


def write_splits(output: str, manifests: dict[str, Manifest]) -> SplitsManifest:
    """The manifest over a folder of splits, each of which has its own already."""
    write_bytes(
        output,
        "dataset_dict.json",
        b'{"splits": ["' + b'", "'.join(s.encode() for s in manifests) + b'"]}\n',
    )
    infos: list[SplitInfo] = []
    for name in manifests:
        path = os.path.join(output, name, MANIFEST)
        infos.append(SplitInfo(name=name, bytes=os.path.getsize(path), checksum=checksum_file(path)))
    manifest = SplitsManifest(
        splits=tuple(infos), padless_version=next(iter(manifests.values())).padless_version
    )
    write_bytes(output, MANIFEST, manifest.to_json())
    sync_folder(output)
    return manifest
