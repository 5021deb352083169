"""What a node of a Ray cluster does: chunks tokenized, or one shard written.

Both are functions of what they are given and may be done twice, so a task whose node died is simply given
to another. Whatever travels does so as bytes, unpacked after a look at whether this node has the code and
libraries of the driver and sees its folder. The tokenizer comes along and is loaded once in each worker
process. What goes wrong comes back as a value: Ray would wrap an exception in its own.
"""

from __future__ import annotations

import gc
import os
import pickle
import secrets
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from padless.packer.chunk import ChunkResult, ChunkWork
from padless.packer.errors import ClusterError
from padless.packer.gather_part import Batches, GatherPart
from padless.packer.identity import version_of
from padless.packer.plan import PackPlan
from padless.packer.prepared import Task
from padless.packer.write import Layout, write_shard
from padless.runtime.format import PadlessError, ShardInfo

SEEN = "ray"
"""In the work folder: the id of the run, by which a node knows the folder."""
LIBRARIES = ("tokenizers", "fastokens", "jinja2", "minijinja", "orjson", "numpy", "pyarrow")
"""Whose versions can change a byte."""

Run = dict[str, Any]
"""`id`, `versions` and `work` (the work folder's path, None: nodes have no business there): of plain types,
which every version can read."""
_Found = TypeVar("_Found")
Packed = NDArray[np.uint8]
"""A pickle, which Ray hands over without a copy."""


@dataclass(frozen=True, kw_only=True)
class ChunkJob:
    """A chunk, and what its source must look like from a node."""

    task: Task
    source: tuple[str, int, int] | None
    """Path, bytes, time of change in ns; None: the chunk carries its bytes."""


@dataclass(frozen=True, kw_only=True)
class ShardJob:
    """A shard: its packs, and where the tokens of their sequences lie."""

    folder: str
    number: int
    part: GatherPart
    plan: PackPlan
    batches: Batches
    layout: Layout


def pack(value: Any) -> Packed:
    """A value as what travels."""
    return np.frombuffer(pickle.dumps(value, protocol=5), dtype=np.uint8)


@lru_cache(1)
def versions() -> dict[str, str]:
    """What decides the bytes that this process makes: the code of padless, and its libraries' versions."""
    digest = xxhash.xxh3_64()
    packer = Path(__file__).resolve().parent
    import padless.runtime.format

    runtime = Path(padless.runtime.format.__file__).resolve().parent
    for folder in (packer, runtime):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.relative_to(folder).as_posix().encode())
            digest.update(path.read_bytes())
    code = f"{version_of('padless')} (code {digest.hexdigest()[:8]})"
    return {"padless": code, **{name: version_of(name) for name in LIBRARIES}}


def tokenize(run: Run, work: Packed, jobs: Packed) -> list[ChunkResult] | Exception:
    """The results of some chunks, or why there are none."""

    def chunks() -> list[ChunkResult]:
        able = _work(run, work)
        asked: list[ChunkJob] = pickle.loads(jobs.data)
        for source in {job.source for job in asked if job.source is not None}:
            _check_source(*source)
        return [able.finish(able.prepare(job.task)) for job in asked]

    return _guarded(chunks)


def write(run: Run, job: Packed) -> ShardInfo | Exception:
    """The shard that was written, or why it could not be."""

    def shard() -> ShardInfo:
        _check(run)
        asked: ShardJob = pickle.loads(job.data)
        gather = asked.part.gather(run["work"])
        what = (asked.folder, asked.number, asked.batches, asked.plan, gather, asked.layout)
        return write_shard(*what, lambda tokens: None, attempt=secrets.token_hex(4))

    return _guarded(shard)


def _guarded(do: Callable[[], _Found]) -> _Found | Exception:
    gc.disable()  # records make no cycles, and a collection costs a tenth of the time
    try:
        return do()
    except (PadlessError, OSError) as error:
        return error
    except Exception as error:  # ours: the driver shows where
        return RuntimeError(f"{error}\n{traceback.format_exc()}")
    finally:
        gc.enable()


_able: tuple[str, ChunkWork] | None = None
"""The id of the run that this worker process worked for last, and what it takes."""


def _work(run: Run, packed: Packed) -> ChunkWork:
    global _able
    if _able is None or _able[0] != run["id"]:
        _check(run)
        _able = (run["id"], pickle.loads(packed.data))
    return _able[1]


def _check(run: Run) -> None:
    """See that this node makes the driver's bytes, where the driver looks for them."""
    mine = versions()
    others = [
        f"{name} {mine.get(name, 'none')}, the driver {version}"
        for name, version in run["versions"].items()
        if mine.get(name) != version
    ]
    if others:
        raise ClusterError(
            f"node {socket.gethostname()} has {'; '.join(others)}: the bytes could differ. Install the same "
            "versions on every node and run the same command again, it goes on where it stopped"
        )
    if run["work"] is None:
        return
    try:
        with open(os.path.join(run["work"], SEEN), encoding="ascii") as file:
            found = file.read()
    except OSError as error:
        found = f"({error.strerror})"
    if found != run["id"]:
        raise ClusterError(
            f"node {socket.gethostname()} does not see the driver's {run['work']} "
            f"{found if found.startswith('(') else '(it has another of that name)'}: --output must be a "
            "URL or on storage that every node has at the same path; mount it there and run the same command "
            "again"
        )


def _check_source(path: str, size: int, changed: int) -> None:
    try:
        about = os.stat(path)
        found = "" if (about.st_size, about.st_mtime_ns) == (size, changed) else "another file of that name"
    except OSError as error:
        found = str(error.strerror)
    if found:
        raise ClusterError(
            f"node {socket.gethostname()} does not see the driver's {path} ({found}): sources must be URLs "
            "or on storage that every node has at the same path; mount it there and run the same command "
            "again"
        )
