"""What a repack is: the manifest's facts that are known beforehand, and whether a folder has just those."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padless.packer.config import PackConfig
from padless.packer.errors import InputError
from padless.packer.identity import KNOWN_LATER, Finished, differing, finished
from padless.packer.repack_config import PLANNING
from padless.runtime.format import Manifest, SourceInfo, checksum_bytes


class RepackIdentity:
    """The options and sources of what comes out; of one folder those of a fresh build."""

    def __init__(
        self,
        config: PackConfig,
        folders: list[dict[str, Manifest]],
        names: list[str],
        firsts: list[Manifest],
        excluded: NDArray[np.int64] | None,
    ) -> None:
        self.config, self.firsts = config, firsts
        self._folders = folders
        self.splits = tuple(folders[0])
        self.largest_id = max(first.largest_id for first in firsts)
        self._excluded = excluded
        if excluded is not None and len(excluded):
            total = sum(part.statistics["records"]["in"] for splits in folders for part in splits.values())
            beyond = excluded[(excluded < 0) | (excluded >= total)]
            if len(beyond):
                raise InputError(
                    f"--exclude names record {beyond[0]:,}, but {' and '.join(names)} have {total:,} (from 0)"
                )

    @cached_property
    def options(self) -> dict[str, Any]:
        """Recorded options: of several folders with a list of values where they were built differently."""
        found: dict[str, Any] = {}
        several = set()
        for name in sorted({name for first in self.firsts for name in first.options}):
            values = [first.options.get(name) for first in self.firsts]
            if name == "image_rule":  # one for all that have images (check_alike)
                values = [value for value in values if value is not None] or [None]
            found[name] = values[0]
            if any(value != values[0] for value in values):
                found[name] = values
                several.add(name)
        found["formats"] = [name for first in self.firsts for name in first.options.get("formats", [])]
        recorded = self.config.recorded()
        if len(self.firsts) > 1:
            found["source_splits"] = self._source_splits()
            if "source_arguments" in found:
                found["source_arguments"] = self.source_arguments
            recorded = {name: value for name, value in recorded.items() if name not in several - {*PLANNING}}
        found.update({name: list(v) if isinstance(v, tuple) else v for name, v in recorded.items()})
        for name in KNOWN_LATER - {"formats"}:
            found.pop(name, None)
        if self._excluded is not None:
            found["excluded"] = checksum_bytes(self._excluded.tobytes())
        return found

    def key(self) -> str:
        """Names everything that decides the tokens of the new sequences."""
        manifests = [checksum_bytes(part.to_json()) for splits in self._folders for part in splits.values()]
        return checksum_bytes(repr([self.options, manifests]).encode("utf-8"))

    @property
    def source_arguments(self) -> list[int]:
        """Of each source over all folders, the argument of a build that named it; those of folders differ."""
        found: list[int] = []
        for first in self.firsts:
            start = max(found, default=-1) + 1
            given = first.options.get("source_arguments") or range(len(first.sources))
            found += [start + number for number in given]
        return found

    def _source_splits(self) -> list[str]:
        """The split of each source over all folders; empty where no source has one."""
        found: list[str] = []
        for first in self.firsts:
            found += first.options.get("source_splits") or [""] * len(first.sources)
        return found if any(found) else []

    @property
    def sources(self) -> tuple[SourceInfo, ...]:
        return tuple(replace(source, records=0) for first in self.firsts for source in first.sources)

    def finished(self) -> Finished | None:
        """What an earlier run of this very repack (or the build that it equals) left, or None.

        Raises what `padless.packer.identity.finished` does.
        """
        return finished(self.config, self._differences)

    def _differences(self, old: Manifest, splits: tuple[str, ...]) -> list[str]:
        later = KNOWN_LATER - {"formats"}
        found = differing(old, splits, self.options, self.splits, later)
        if old.tokenizer_fingerprint != self.firsts[0].tokenizer_fingerprint:
            found.append("another tokenizer")
        if [(s.path, s.checksum) for s in old.sources] != [(s.path, s.checksum) for s in self.sources]:
            found.append("other sources")
        return found
