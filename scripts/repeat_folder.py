"""A packed folder of any size out of a small one, for benchmarks that need size and not content.

    python scripts/repeat_folder.py packed-2048 packed-10gb --gib 10

The packs of the folder are repeated in record batches of 32 MiB of tokens up to one shard of 512 MiB,
and that shard is linked under as many names as it takes: manifest and reader see the full size, the
disk holds one shard. The sequence table stays the small folder's: nothing that needs it can be asked.
"""

from __future__ import annotations

import argparse
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc

from padless.runtime.format import MANIFEST, hash_file, open_folder
from padless.runtime.manifest import Manifest, ShardInfo

BATCH_TOKENS_BYTES = 32 << 20
SHARD_BYTES = 512 << 20


def write_shard(folder: Path, manifest: Manifest, path: Path) -> ShardInfo:
    """One shard with the folder's packs again and again; its line of the manifest."""
    tables = []
    for shard in manifest.shards:
        with pa.memory_map(str(folder / shard.file)) as file, pa.ipc.open_stream(file) as stream:
            tables.append(stream.read_all())
    table = pa.concat_tables(tables).combine_chunks()
    width = table.schema.field("input_ids").type.value_type.bit_width // 8
    tokens = pc.sum(table.column("num_tokens")).as_py()
    repeats = max(1, BATCH_TOKENS_BYTES // (tokens * width))
    batch = pa.concat_tables([table] * repeats).combine_chunks().to_batches()[0]
    batches: list[tuple[int, int]] = []
    with path.open("wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
        out.flush()
        # pyarrow writes the schema together with the first batch.
        start = table.schema.serialize().size
        while start + batch.get_total_buffer_size() < SHARD_BYTES or not batches:
            batches.append((start, batch.num_rows))
            writer.write_batch(batch)
            start = out.tell()
    sequences = sum(shard.sequences for shard in manifest.shards)
    hashed = hash_file(path)
    return ShardInfo(
        file=path.name,
        packs=sum(packs for _, packs in batches),
        sequences=sequences * repeats * len(batches),
        tokens=tokens * repeats * len(batches),
        bytes=path.stat().st_size,
        checksum=hashed.checksum,
        batches=tuple(batches),
        block_checksums=hashed.block_checksums,
    )


def repeat_folder(source: Path, output: Path, gib: float) -> int:
    """Write the folder, give its size in bytes."""
    folder, manifest = open_folder(source)
    shutil.rmtree(output, ignore_errors=True)
    shutil.copytree(folder, output, ignore=shutil.ignore_patterns("shard-*", "plans"))
    first = write_shard(folder, manifest, output / "shard-00000.arrow")
    shards = [first]
    while len(shards) * first.bytes < gib * 2**30:
        shards.append(replace(first, file=f"shard-{len(shards):05d}.arrow"))
        os.link(output / first.file, output / shards[-1].file)
    statistics = manifest.statistics | {"packs": sum(shard.packs for shard in shards)}
    repeated = replace(manifest, shards=tuple(shards), statistics=statistics)
    (output / MANIFEST).write_bytes(repeated.to_json())
    return sum(shard.bytes for shard in shards)


def main() -> None:
    """Repeat a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("source", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--gib", type=float, default=10)
    args = parser.parse_args()
    print(f"{args.output}: {repeat_folder(args.source, args.output, args.gib) / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
