"""What a build is: everything that decides its bytes, and whether a folder holds just that.

A finished folder of the same build is left alone, one of another build is refused; an unfinished one goes
on with the chunks whose key is the same.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from padless.packer.config import PackConfig
from padless.packer.errors import InputError
from padless.packer.image_rule import ImageRule, rule_of
from padless.packer.mixing import Mix
from padless.packer.published import check_published, read_published
from padless.packer.sources import SourceFile, digest, stamp
from padless.packer.sources.splits import TRAIN, VALIDATION, is_for_evaluation
from padless.packer.tokenizer_files import TokenizerFiles
from padless.runtime.format import (
    MANIFEST,
    Manifest,
    SplitsManifest,
    check_file,
    checksum_bytes,
    load_manifest,
    read_manifest,
)
from padless.runtime.storage import is_url

if TYPE_CHECKING:
    from padless.packer.fim import Fim

KNOWN_LATER = frozenset({"formats", "packed_with", "grouped_by"})
"""Recorded options that follow from the sources and the others."""
MOST_SPLITS = 256
"""What the lines of a build can number."""


def version_of(package: str) -> str:
    """An installed package's version; "unknown" where it is not installed (a bare checkout)."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


Finished = tuple[Manifest | SplitsManifest, dict[str, Manifest]]
"""The manifest of a finished folder, and that of each split."""


def finished(
    config: PackConfig, differences: Callable[[Manifest, tuple[str, ...]], list[str]]
) -> Finished | None:
    """What lies in the output, or None where there is nothing finished or it is to be replaced.

    `differences` says in which ways the first split's manifest, and the names of all splits, are not those
    of this run. InputError where there are any: nobody said `force`. What `check_file` raises where a file is
    missing or of another size.
    """
    output = config.output
    there = None if config.force else _finished_in(output)
    if there is None:
        return None
    manifest, manifests = there
    found = differences(next(iter(manifests.values())), tuple(manifests))
    if found:
        raise other_build(output, found)
    if is_url(output):
        check_published(output, manifests)
        return there
    for name, inner in manifests.items():
        for file in inner.files:
            check_file(Path(output, name, file.file), file.bytes)
    return there


def other_build(output: str, differences: list[str]) -> InputError:
    """The error to raise for a finished folder that is not what this run would make."""
    return InputError(
        f"{output} holds a finished data set of another build ({'; '.join(differences[:4])}): give another "
        "--output, or --force to replace it"
    )


def _finished_in(output: str) -> Finished | None:
    """The manifests of a finished folder, or behind a URL; None where there are none."""
    if is_url(output):
        return read_published(output)
    if not os.path.exists(os.path.join(output, MANIFEST)):
        return None
    manifest = load_manifest(output)
    if isinstance(manifest, SplitsManifest):
        return manifest, {name: read_manifest(os.path.join(output, name)) for name in manifest.names}
    return manifest, {"": manifest}


def differing(
    old: Manifest,
    old_splits: tuple[str, ...],
    options: Mapping[str, Any],
    splits: tuple[str, ...],
    later: Set[str],
) -> list[str]:
    """In which splits and options, but for those that are known `later`, a folder is another one."""
    found: list[str] = []
    if old_splits != splits:
        before, now = (" and ".join(names).strip() or "one folder" for names in (old_splits, splits))
        found.append(f"splits: {before}, now {now}")
    # What a repack adds (records that it left out, say) is another data set too.
    for name in sorted({*options, *old.options} - later):
        if old.options.get(name) != options.get(name):
            found.append(f"{name} {old.options.get(name)!r}, now {options.get(name)!r}")
    return found


@dataclass
class Identity:
    """A build's configuration with its sources and its tokenizer."""

    config: PackConfig
    files: list[SourceFile]
    tokenizer: TokenizerFiles

    @cached_property
    def splits(self) -> tuple[str, ...]:
        """Names of the split folders, those to train on first; ("",) where the output is one."""
        if self.config.eval_fraction:
            return TRAIN, VALIDATION
        names = list(dict.fromkeys(file.split for file in self.files))
        if len(names) > MOST_SPLITS:
            raise InputError(f"{len(names):,} splits, of at most {MOST_SPLITS}: name fewer with --split")
        return tuple(sorted(names, key=is_for_evaluation))

    def split_of(self, file: SourceFile) -> int:
        """The number of the split that a file's records go to, unless their content says."""
        return self.splits.index(file.split) if file.split else 0

    @cached_property
    def template(self) -> str | None:
        """The chat template's text."""
        from padless.packer.template import CLASSIC, load_template  # a repack renders nothing

        if self.config.template == CLASSIC:
            return None
        return load_template(self.config.template, self.tokenizer.own_template())

    @cached_property
    def template_checksum(self) -> str | None:
        if self.template is None:
            return None
        return "sha256:" + hashlib.sha256(self.template.encode("utf-8")).hexdigest()

    @cached_property
    def mix(self) -> Mix | None:
        """How much of each source is packed; None: every record once."""
        return Mix.of(self.config)

    @cached_property
    def end_id(self) -> int | None:
        """The token that closes a text."""
        return self.special_id("eos", "eos_token")

    @cached_property
    def fim(self) -> Fim | None:
        """How texts are rearranged; None: they are not."""
        from padless.packer.fim import Fim

        return Fim.of(self.config, self.tokenizer, self.end_id)

    @cached_property
    def options(self) -> dict[str, Any]:
        """What can change the bytes, as the manifest gives it back, but for what the data decide."""
        from padless.packer.template import CLASSIC

        found = self.config.recorded()
        found["source_splits"] = [file.split for file in self.files] if self.files[0].split else []
        found["classic_prompts"] = self.config.template == CLASSIC
        found["eos_id"] = self.end_id
        if self.fim is not None:
            found["fim_ids"] = list(self.fim.ids)
        rule = rule_of(self.tokenizer)
        if isinstance(rule, ImageRule):
            found["image_rule"] = rule.recorded()
        if self.mix is not None:
            found["mix"] = self.mix.recorded()
        if self.mix is not None or self.config.homogeneous:
            found["source_arguments"] = [file.argument for file in self.files]
        return {name: list(v) if isinstance(v, tuple) else v for name, v in found.items()}

    def special_id(self, option: str, name: str) -> int | None:
        """The token that --bos or --eos asks for. InputError where the tokenizer has none of that name."""
        value = getattr(self.config, option)
        if value == "none":
            return None
        text = self.tokenizer.named_tokens().get(name) if value == "auto" else value
        if text is None:
            return None
        found = self.tokenizer.token_id(text)
        if found is None:
            raise InputError(
                f"--{option} {text!r} is no token of the tokenizer in {self.config.tokenizer}; give one that "
                "is, or none"
            )
        return found

    def key(self) -> str:
        """Names everything that decides what a chunk becomes."""
        tokenizer = checksum_bytes(self.tokenizer.contents["tokenizer.json"])
        engines = [version_of(name) for name in ("padless", "tokenizers", "jinja2", "minijinja")]
        facts: list[Any] = [self.options, tokenizer, self.template_checksum, engines, self.config.image_root]
        for file in self.files:
            facts.append([file.name, file.split, *self._stamp(file)])
        return checksum_bytes(repr(facts).encode("utf-8"))

    @staticmethod
    def _stamp(file: SourceFile) -> tuple[Any, ...]:
        """What tells cheaply whether a source is still what it was."""
        if file.data is not None:
            return (stamp(file.data),)
        if file.stamp is not None:
            return (file.stamp,)
        if file.revision is not None:
            return (file.revision, file.checksum)
        about = os.stat(file.path)
        return (about.st_size, about.st_mtime_ns)

    def finished(self) -> Finished | None:
        """What an earlier run of this very build left, or None; raises what `finished` does."""
        found = finished(self.config, self._differences)
        rule = rule_of(self.tokenizer)
        # Behind a URL all shards would have to come for it.
        if found is not None and isinstance(rule, ImageRule) and not is_url(self.config.output):
            from padless.packer.images_again import changed_image

            if changed := changed_image(self.config, self.files, found[1], rule):
                raise other_build(self.config.output, [changed])
        return found

    def _differences(self, old: Manifest, splits: tuple[str, ...]) -> list[str]:
        found = differing(old, splits, self.options, self.splits, KNOWN_LATER)
        if old.tokenizer_fingerprint != self.tokenizer.fingerprint:
            found.append("another tokenizer")
        if old.chat_template_checksum != self.template_checksum:
            found.append("another chat template")
        if [source.path for source in old.sources] != [file.name for file in self.files]:
            return [*found, f"{len(old.sources):,} source files, now {len(self.files):,} or others"]
        for source, file in zip(old.sources, self.files, strict=True):
            if file.stamp is not None and file.revision is not None:
                if (file.revision, file.size) == (source.revision, source.bytes):
                    continue  # by its store's mark; it need not be read
            told = file.data is None and not file.is_on_hub and file.size
            if (told and file.size != source.bytes) or digest(file) != (source.bytes, source.checksum):
                found.append(f"{file.name} has changed")
        return found
