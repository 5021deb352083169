"""Read packed folders that somebody has tampered with: an error of padless or the right data, never else.

Small folders (mapped and compressed shards, several shards, splits, a plan) are changed one file at a time:
bits, numbers, cuts, insertions, and edits of the manifest's JSON, among them paths that point out of the
folder. Where the file's size changes, the manifest is often made to agree, so that the readers behind it
are reached too. Each is then opened, every pack and the whole sequence table read, and now and then
`verify`, `inspect` and `report` run on it, in child processes with a limit on their memory and time. What
counts as a finding: any error that is not padless's own, a process that ends or hangs, a file outside the
folder that is read, data that differ although the manifest was left as it is.

    python scripts/fuzz_folder.py --inputs 20000 --seed 0     # or --seconds 60
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import patch

import numpy as np
from fuzz_changes import BINARY, JSON

from padless.runtime.format import BlockHasher, PadlessError, checksum_bytes, load_manifest
from padless.runtime.reader import PackedReader

DEMO = Path(__file__).resolve().parent.parent / "packer" / "demo_data"
SECONDS = 20
"""Of a processor that one input may take; ten times as long by the clock, on a busy machine."""
MEMORY = 2**30
"""Bytes of address space beyond what the process has when it starts."""
BATCH = 250
"""Inputs of a child process."""
COMMANDS = 20
"""One input in so many goes through the commands too."""
PLAN = "other"


@dataclass(frozen=True, kw_only=True)
class Base:
    """A sound folder that the changed ones are made from."""

    name: str
    options: tuple[str, ...]
    split: str = ""


BASES = (
    Base(name="mapped", options=("--shard-size", "20000")),
    Base(name="zstd", options=("--compression", "zstd", "--labels", "always")),
    Base(name="lz4", options=("--compression", "lz4", "--max-length", "700", "--overflow", "truncate")),
    Base(name="splits", options=("--eval-fraction", "0.3"), split="train"),
)
"""Each gets a plan."""


def pack(*arguments: object) -> None:
    """A command that must succeed."""
    command = [sys.executable, "-m", "padless.packer.cli", *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True)


def make_bases(folder: Path) -> None:
    """Build every base below a folder; beside them lies what no reader may touch."""
    for base in BASES:
        source = DEMO / "instructions.jsonl"
        words = ["build", source, "--tokenizer", DEMO / "tokenizer", "--max-length", 1024, "--limit", 80]
        pack(*words, *base.options, "--output", folder / base.name)
        pack("repack", folder / base.name, "--plan-only", PLAN, "--strategy", "spread", "--seed", 3)


# -- one input -----------------------------------------------------------------------------------------


def fingerprint(reader: PackedReader) -> str:
    """All that the reader gives, read to the last number."""
    parts = []
    for one in reader:
        for name in ("input_ids", "labels", "seq_lengths", "sequence_ids"):
            parts.append(checksum_bytes(np.ascontiguousarray(getattr(one, name)).tobytes()))
        parts.append(f"{one.num_tokens} {one.num_targets} {one.max_seqlen} {one.attention_cost}")
        assert int(one.seq_lengths.sum()) == one.num_tokens == len(one.input_ids) == len(one.labels)
    return checksum_bytes("\n".join(parts).encode())


def read_all(folder: Path, split: str, plan: str | None, *, verify: bool) -> str:
    """Open, read every pack and the whole table; what came."""
    reader = PackedReader(folder, split=split or None, plan=plan, verify=verify)
    for file in reader.manifest.files:
        path = (reader.path / file.file).resolve()
        assert path.is_relative_to(folder.resolve()), f"{path} lies outside"
    found = fingerprint(reader)
    reader.sequence_table()
    reader.pack_sizes()
    return found


def run_command(*words: str) -> None:
    """A command in this process; AssertionError where it ends as none should."""
    from padless.packer.commands import run

    out, err = io.StringIO(), io.StringIO()
    with (
        patch.object(sys, "argv", ["pack-dataset", *words]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = run()
    assert code in (0, 1, 2) and "Traceback" not in err.getvalue(), f"{words}: {code}\n{err.getvalue()}"


def replace_file(path: Path, data: bytes) -> None:
    """A new file under the name: the old one may be mapped still."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


class Fuzzer:
    """The folders of one child process, changed and put right again."""

    def __init__(self, bases: Path, work: Path) -> None:
        self.work = work
        for base in BASES:
            shutil.copytree(bases / base.name, work / base.name)
        shutil.copytree(bases / "mapped", work / "outside")
        self.right = {
            (base.name, plan): read_all(work / base.name, base.split, plan, verify=True)
            for base in BASES
            for plan in (None, PLAN)
        }

    def run(self, seed: str) -> tuple[str, str]:
        """One input: what was changed, and how it ended (right, other data, or an error's name)."""
        chance = random.Random(seed)
        base = chance.choice(BASES)
        top = self.work / base.name
        folder = top / base.split
        files = [
            "manifest.json",
            "manifest.json",
            "shard",
            "shard",
            "sequences.parquet",
            f"plans/{PLAN}.parquet",
        ]
        if base.split:
            files.append("../manifest.json")
        name = chance.choice(files)
        path = chance.choice(sorted(folder.glob("shard-*"))) if name == "shard" else folder / name
        change = chance.choice(JSON if name.endswith(".json") else BINARY)
        kind = f"{name.removeprefix('../')} {change.__name__}"
        before = {path: path.read_bytes()}
        data = bytes(change(bytearray(before[path]), chance))
        replace_file(path, data)
        if not name.startswith("plans") and chance.random() < 0.8:
            self._agree(base, folder, path, data, before, chance)
        verify = chance.random() < 0.3
        plan = PLAN if name.startswith("plans") or chance.random() < 0.1 else None
        try:
            found = read_all(top, base.split, plan, verify=verify)
            is_right = found == self.right[base.name, plan]
            untouched = len(before) == 1 and not name.endswith(".json")
            assert is_right or not untouched, f"other data passed the checksums: {kind}"
            ended = "right" if is_right else "other data"
        except PadlessError as error:
            ended = type(error).__name__
        finally:
            try:
                if chance.randrange(COMMANDS) == 0:
                    self._commands(folder)
            finally:
                for touched, old in before.items():
                    replace_file(touched, old)
        return kind, ended

    def _agree(
        self,
        base: Base,
        folder: Path,
        path: Path,
        data: bytes,
        before: dict[Path, bytes],
        chance: random.Random,
    ) -> None:
        """Make what lists the file agree with its new size, and perhaps with its checksums."""
        checksum = chance.random() < 0.3
        listing = folder / "manifest.json"
        if path == listing:
            if not base.split:
                return
            listing = folder.parent / "manifest.json"
        elif path == folder.parent / "manifest.json":
            return
        content = json.loads(listing.read_bytes())
        name = base.split if path.name == "manifest.json" else path.name
        entries = [
            *content.get("shards", []),
            *content.get("sequence_tables", []),
            *content.get("splits", []),
        ]
        for entry in entries:
            if name == entry.get("file", entry.get("name")):
                if entry["bytes"] == len(data) and not checksum and "splits" not in content:
                    return
                entry["bytes"] = len(data)
                if checksum or chance.random() < 0.8:  # otherwise nothing behind the manifest is reached
                    entry.pop("block_checksums", None)
                if checksum and chance.random() < 0.5:
                    hasher = BlockHasher()
                    hasher.update(memoryview(data))
                    entry["block_checksums"] = hasher.block_checksums
                if checksum or "splits" in content:
                    entry["checksum"] = checksum_bytes(data)
        before[listing] = listing.read_bytes()
        replace_file(listing, json.dumps(content).encode())

    def _commands(self, folder: Path) -> None:
        for words in (
            ("verify", str(folder), "--json"),
            ("inspect", str(folder), "--pack", "0", "--json"),
            ("report", str(folder), "--json"),
            ("verify", str(folder.parent if folder.name == "train" else folder)),
        ):
            run_command(*words)


# -- children ------------------------------------------------------------------------------------------


def child(pipe: Connection, bases: Path, work: Path, seeds: list[str]) -> None:
    """Inputs one after the other: (seed, kind, end) for each; a death tells which one by silence."""
    faulthandler.enable()
    fuzzer = Fuzzer(bases, work)
    _warm(work / "mapped")
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for seed in seeds:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # both end the process
        signal.alarm(10 * SECONDS)
        try:
            kind, ended = fuzzer.run(seed)
        except BaseException:
            kind, ended = "finding", traceback.format_exc()
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        pipe.send((seed, kind, ended))
    pipe.close()


def _warm(folder: Path) -> None:
    """Load what the commands import before memory is limited."""
    for word in ("verify", "inspect", "report"):
        run_command(word, str(folder))


def main() -> None:
    """Run batches until all inputs or the time are used up; exit 1 with the findings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", help="seeds of single inputs, as a finding names them")
    options = parser.parse_args()
    seeds = options.only or [f"{options.seed}/{number}" for number in range(options.inputs)]
    context = multiprocessing.get_context("fork")
    begin = time.monotonic()
    ends: dict[str, Counter[str]] = {}
    findings: list[str] = []
    done = 0
    with tempfile.TemporaryDirectory(prefix="fuzz-folder-") as name:
        bases = Path(name) / "bases"
        make_bases(bases)
        for base in BASES:
            load_manifest(bases / base.name)
        while done < len(seeds) and time.monotonic() - begin < options.seconds:
            batch = seeds[done : done + BATCH]
            work = Path(name) / "work"
            work.mkdir()
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=child, args=(there, bases, work, batch))
            process.start()
            there.close()
            told = 0
            with contextlib.suppress(EOFError):
                while True:
                    seed, kind, ended = here.recv()
                    told += 1
                    if kind == "finding":
                        findings.append(f"{seed}: {ended}")
                    ends.setdefault(kind, Counter())[ended.splitlines()[-1][:80]] += 1
            process.join()
            if told < len(batch):
                findings.append(f"{batch[told]}: the process ended with {process.exitcode}")
                told += 1
            done += told
            shutil.rmtree(work)
    print(f"{done:,} inputs, seed {options.seed}, {time.monotonic() - begin:.0f} s, {len(findings)} findings")
    for kind, counts in sorted(ends.items()):
        listed = ", ".join(f"{count:,} {ended}" for ended, count in counts.most_common())
        print(f"{kind:32} {counts.total():6,}: {listed}")
    print(f"total: {sum(ends.values(), Counter()).most_common()}")
    for finding in findings[:20]:
        print(finding, file=sys.stderr)
    sys.exit(1 if findings else 0)


if __name__ == "__main__":
    main()
