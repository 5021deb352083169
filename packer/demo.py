"""The whole way on what ships with padless: build, report, one pack. Nothing comes from a network.

The set is small (some 400 records) and its tokenizer was trained on it, so a figure seen here says
how padless works and nothing about real data; the lengths are spread like those of real
instruction sets, so the share of padding saved is about right.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

DEMO_DATA = Path(__file__).parent / "demo_data"
DEFAULT_OUTPUT = Path("packed-demo")
MAX_LENGTH = 1024  # tokens; the longest record has 778, and a pack still fits a few screens


def run_demo(output: Path | None, console: Console) -> dict[str, Any]:
    """Pack the demo set into a folder (None: ./packed-demo) and show on the console what came out.

    Gives what was shown: `output`, `shards` (paths), `report` and `pack`. A finished demo folder
    is shown again and left as it is; a folder of anything else is refused.

    Raises:
        InputError: the folder holds something else.
    """
    # Here and not above: `pack-dataset --help` must not pay for what only this command needs.
    from padless.packer import PackConfig, pack_dataset
    from padless.packer.inspect import describe_pack, print_pack
    from padless.packer.report import build_report
    from padless.packer.report_view import print_report
    from padless.runtime.format import read_manifest

    folder = DEFAULT_OUTPUT if output is None else output
    pack_dataset(
        PackConfig(
            sources=(os.fspath(DEMO_DATA / "instructions.jsonl"),),
            tokenizer=os.fspath(DEMO_DATA / "tokenizer"),
            max_length=MAX_LENGTH,
            output=os.fspath(folder),
        )
    )
    report = build_report(folder)
    print_report(report, console)
    pack = describe_pack(folder, 0)
    print_pack(pack, console)
    shards = [os.fspath(folder / shard.file) for shard in read_manifest(folder).shards]
    console.print("The shards:", style="bold")
    for shard in shards:
        # soft_wrap: a path that is cut into lines cannot be copied.
        console.print(f"  {shard}", markup=False, highlight=False, soft_wrap=True)
    return {"output": os.fspath(folder), "shards": shards, "report": report, "pack": pack}
