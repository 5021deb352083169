"""Every option of a build, checked once at the door.

The fields are spelled like the options of `pack-dataset build`; a YAML file has the same names. What can
change the bytes of a packed folder is in `PackConfig.recorded()` and goes into the manifest; what cannot
(output, workers, engine, force, quiet) does not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from padless.packer.errors import InputError, OptionError

OVERFLOW = ("error", "drop", "truncate", "split")
TRAIN_ON = ("auto", "all", "completion", "assistant", "last")
LABELS = ("auto", "always")
COMPRESSION = ("none", "zstd", "lz4")
KEEP_OR_DROP = ("keep", "drop")
ERROR_OR_DROP = ("error", "drop")
ENGINES = ("local", "ray")
MIX_BY = ("records", "tokens", "trained")

INT64_MAX = 2**63 - 1
INT32_MAX = 2**31 - 1
"""Lengths and offsets within a pack are int32 in the packed folder."""
_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?i?b)?\s*", re.IGNORECASE)
NOT_RECORDED = frozenset(
    ("sources", "eval_sources", "split", "subset", "revision", "tokenizer", "template", "output", "workers")
    + ("image_root",)
    + ("force", "progress", "engine", "ray_address")
    # These stand in the manifest as `mix`, by source.
    + ("weights", "max_records", "max_tokens", "mix_by", "mix_target", "max_repeats")
)


def byte_size(value: str | int) -> int:
    """`512MiB`, `1GB` or `65536` as bytes. InputError for anything else."""
    found = _SIZE.fullmatch(str(value))
    if found is None:
        raise InputError(f"{value!r} is no size: give bytes, or a number with kB, MB, GB, KiB, MiB or GiB")
    return int(float(found[1]) * _UNITS[(found[2] or "b").lower()])


def is_templates_own(name: str) -> bool:
    """Whether a variable of chat templates is padless's to give, so that neither options nor records may."""
    own = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
    return name in own or name.startswith("padless_")


@dataclass(frozen=True, kw_only=True)
class PackConfig:
    """What to pack and how; raises OptionError (an InputError) naming the option, its value and the limit."""

    sources: tuple[Any, ...]
    """Files, globs, folders, Hub ids, and objects of the `datasets` library (Dataset, IterableDataset,
    DatasetDict, or a dict of them)."""
    tokenizer: str
    """A local tokenizer folder (with tokenizer.json), or a model's name on the Hub."""
    max_length: int | tuple[int, ...]
    """Tokens per pack; several lengths: each sequence goes to the shortest packs that hold it. Longer ones
    than the longest packs follow `overflow`."""
    output: str
    """The folder to write, or a URL (`s3://bucket/packed`), whose folder is made in PADLESS_CACHE before."""
    format: str = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)
    """Role -> column name, where a source names its columns otherwise."""
    split: str | None = None
    """Of sources with splits; None: train. `train,test` or `all` make a folder with splits."""
    subset: str | None = None
    """Of a data set on the Hub; None: its default."""
    revision: str | None = None
    """Branch, tag or commit of a data set on the Hub; None: the newest."""
    text_by: str = "line"
    limit: int | None = None
    """Take the first so many records of all sources."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Source (as in `sources`) -> its share of the mix, against 1 for those that are not named."""
    max_records: Mapping[str, int] = field(default_factory=dict)
    """Source -> the records to draw from, at most."""
    max_tokens: Mapping[str, int] = field(default_factory=dict)
    """Source -> the tokens to draw from, at most."""
    mix_by: str = "tokens"
    """What weights and target count."""
    mix_target: int | None = None
    """Size of the mix, in what `mix_by` says; None: the largest that the weights allow."""
    max_repeats: int = 1
    """How often a record may be packed to reach the weights and the target."""
    template: str | None = None
    """A file, or the name of a built-in template; None: the tokenizer's own."""
    template_args: Mapping[str, str | bool | int | float | None] = field(default_factory=dict)
    """Variables for the chat template."""
    image_root: str | tuple[str, ...] | None = None
    """Folder or URL where relative paths of images begin; None: where the record's file lies. A tuple, from
    `estimate`, has one for each of its files."""
    system: str | None = None
    """A system turn put before chats that have none."""
    train_on: str = "auto"
    expand_turns: bool = False
    """One sequence for each trained turn of the assistant, up to it, with nothing else trained."""
    bos: str = "auto"
    eos: str = "auto"
    allow_special: bool = False
    """Let special tokens spelled in the data become special tokens."""
    fim_rate: float = 0.0
    """Share of the texts that are rearranged for filling in the middle (packer/fim.py)."""
    fim_spm_rate: float = 0.5
    """Share of those in the order suffix, prefix, middle; the others are prefix, suffix, middle."""
    fim_tokens: str | None = None
    """PREFIX,SUFFIX,MIDDLE; None: the tokenizer's own, by their usual names."""
    strategy: str = "bfd"
    overflow: str = "error"
    max_sequences_per_pack: int = 1024
    align: int = 1
    """Lengths count as if padded to a multiple of it; tokens are stored without the padding."""
    packs_multiple: int = 1
    """The packs to train on are a multiple of it."""
    plan_window: int | None = None
    """A pack's sequences are among so many neighbours; None: from anywhere (`ordered`: a few hundred)."""
    homogeneous: bool = False
    """A pack holds sequences of one source."""
    on_bad_record: str = "error"
    on_empty_reply: str = "keep"
    max_drop_share: float = 0.05
    """Share of the records that may be lost to faults before the build is refused."""
    eval_fraction: float = 0.0
    eval_sources: tuple[Any, ...] = ()
    eval_strategy: str = "none"
    labels: str = "auto"
    shard_size: int = 512 * 2**20
    """Bytes of a shard, at most (one pack at least)."""
    compression: str = "none"
    seed: int = 0
    workers: int | None = None
    """Processes or threads that tokenize; None: the cores. On Ray the tasks under way, at most; None: two for
    each of the cluster's cores."""
    engine: str = "local"
    """Where the work is done: on this machine, or as tasks of a Ray cluster."""
    ray_address: str | None = None
    """HOST:PORT of the cluster's head; None: RAY_ADDRESS, else a cluster of this machine alone."""
    force: bool = False
    progress: Callable[[str, Mapping[str, float]], None] | None = None
    """Called with a stage's name and its counters; None: silent."""

    def __post_init__(self) -> None:
        from padless.packer.formats import FORMATS, ROLES
        from padless.packer.sources.objects import is_dataset
        from padless.packer.sources.splits import are_several
        from padless.packer.strategies import STRATEGIES
        from padless.packer.strategies.constraints import check_constraints

        for name in ("sources", "eval_sources"):
            value = getattr(self, name)
            alone = isinstance(value, str) or is_dataset(value)
            if alone or not all(isinstance(item, str) or is_dataset(item) for item in value):
                raise OptionError(
                    f"{name} must be a sequence of paths, Hub ids or datasets objects, got {value!r}"
                )
            object.__setattr__(self, name, tuple(value))
        for name in ("tokenizer", "output", "text_by", "train_on", "bos", "eos"):
            self._instance(name, str, "text")
        object.__setattr__(self, "output", self.output.removeprefix("file://"))
        for name in ("template", "system", "split", "subset", "revision", "image_root", "fim_tokens"):
            if name == "image_root" and isinstance(self.image_root, tuple):
                continue
            if getattr(self, name) is not None:
                self._instance(name, str, "text")
        for name in ("allow_special", "expand_turns", "homogeneous", "force"):
            self._instance(name, bool, "true or false")
        self._pairs("columns", (str,), "a column")
        self._pairs(
            "template_args", (str, bool, int, float, type(None)), "a text, number, true, false or null"
        )
        for name in filter(is_templates_own, self.template_args):
            raise OptionError(f"template_args sets {name!r}, which padless gives the template itself")
        unknown = [role for role in self.columns if role not in ROLES]
        if unknown:
            raise OptionError(f"columns has no role {unknown[0]!r}; roles are {', '.join(ROLES)}")
        if not self.sources:
            raise OptionError("sources is empty: name at least one file, glob or folder")
        self._lengths()
        self._integer("max_sequences_per_pack", 1, "sequences", INT32_MAX)
        self._integer("align", 1, "tokens")
        self._integer("packs_multiple", 1, "packs")
        if self.plan_window is not None:
            self._integer("plan_window", 1, "sequences")
        for length in self.max_lengths:
            check_constraints(length, self.align, self.packs_multiple, self.plan_window)
        self._integer("shard_size", 1, "bytes")
        if self.limit is not None:
            self._integer("limit", 1, "records")
        if self.workers is not None:
            self._integer("workers", 1, "workers")
        self._integer("seed", 0, "")
        self._check_mix()
        for name in ("eval_fraction", "max_drop_share", "fim_rate", "fim_spm_rate"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
                raise OptionError(f"{name} must be a share between 0 and 1, got {value!r}")
        if self.eval_fraction == 1:
            raise OptionError("eval_fraction 1 leaves nothing to train on; give less than 1")
        if self.eval_fraction and self.eval_sources:
            raise OptionError("eval_fraction and eval_sources exclude each other; give one of the two")
        if are_several(self.split) and (self.eval_fraction or self.eval_sources):
            raise OptionError(
                f"split {self.split} keeps the sources' own splits, which eval_fraction and eval_sources do "
                "not; give one of them"
            )
        self._choice("format", ("auto", *FORMATS))
        self._choice("strategy", tuple(STRATEGIES))
        self._choice("eval_strategy", tuple(STRATEGIES))
        self._choice("overflow", OVERFLOW)
        self._choice("train_on", TRAIN_ON)
        if self.expand_turns and self.train_on in ("all", "last"):
            raise OptionError(
                f"expand_turns trains each turn in a sequence of its own, train_on {self.train_on} does not; "
                "give one of the two"
            )
        self._check_fim()
        self._choice("labels", LABELS)
        self._choice("engine", ENGINES)
        self._check_address()
        self._choice("compression", COMPRESSION)
        self._choice("on_bad_record", ERROR_OR_DROP)
        self._choice("on_empty_reply", KEEP_OR_DROP)

    @property
    def max_lengths(self) -> tuple[int, ...]:
        """The lengths of packs, ascending."""
        return self.max_length if isinstance(self.max_length, tuple) else (self.max_length,)

    @property
    def longest(self) -> int:
        """Tokens that a sequence may have."""
        return self.max_lengths[-1]

    def _lengths(self) -> None:
        if isinstance(self.max_length, (list, tuple)):
            if not self.max_length:
                raise OptionError("max_length names no length; give at least one, in tokens")
            for length in self.max_length:
                self._number("max_length", length, 1, "tokens", INT32_MAX)
            lengths = tuple(sorted({*self.max_length}))
            if len(lengths) < len(self.max_length):
                raise OptionError(f"max_length names a length twice: {', '.join(map(str, self.max_length))}")
            object.__setattr__(self, "max_length", lengths if len(lengths) > 1 else lengths[0])
        else:
            self._integer("max_length", 1, "tokens", INT32_MAX)

    def _check_address(self) -> None:
        address = self.ray_address
        if address is None:
            return
        if not isinstance(address, str) or not address:
            raise OptionError(f"ray_address must be HOST:PORT of a Ray cluster's head, got {address!r}")
        if self.engine != "ray":
            raise OptionError(f"ray_address {address} is for engine ray; give both")

    def _check_fim(self) -> None:
        if self.fim_tokens is not None and (
            len(names := self.fim_tokens.split(",")) != 3 or not all(names) or len({*names}) != 3
        ):
            raise OptionError(
                f"fim_tokens must be three tokens as PREFIX,SUFFIX,MIDDLE, got {self.fim_tokens!r}"
            )
        if self.fim_rate and self.overflow == "truncate":
            raise OptionError(
                f"fim_rate {self.fim_rate:g} puts the middle of a text last, where overflow truncate cuts it "
                "off: choose error, drop or split"
            )

    def _check_mix(self) -> None:
        self._pairs("weights", (int, float), "a weight")
        for name, weight in self.weights.items():
            if isinstance(weight, bool) or not 0 <= weight < float("inf"):
                raise OptionError(f"weights gives {name} {weight!r}; a weight is 0 or more")
        for option in ("max_records", "max_tokens"):
            self._pairs(option, (int,), "a whole number")
            for name, most in getattr(self, option).items():
                if isinstance(most, bool) or most < 1:
                    raise OptionError(f"{option} gives {name} {most!r}; a cap is at least 1")
        for option in ("weights", "max_records", "max_tokens"):
            unknown = [name for name in getattr(self, option) if name not in self.sources]
            if unknown:
                named = ", ".join(map(str, self.sources[:10]))
                raise OptionError(f"{option} names {unknown[0]}, which is no source; sources are {named}")
        if self.weights and not any(self.weights.get(source, 1) for source in map(str, self.sources)):
            raise OptionError(
                "weights of all sources sum to 0, so nothing would be packed; give one of them more"
            )
        self._choice("mix_by", MIX_BY)
        if self.mix_target is not None:
            self._integer("mix_target", 1, self.mix_by)
        self._integer("max_repeats", 1, "times", INT32_MAX)
        if self.max_repeats > 1 and not self.weights and self.mix_target is None:
            raise OptionError(
                f"max_repeats {self.max_repeats} repeats nothing without weights or "
                "mix_target; give one of them"
            )

    def _integer(self, name: str, least: int, unit: str, most: int = INT64_MAX) -> None:
        self._number(name, getattr(self, name), least, unit, most)

    @staticmethod
    def _number(name: str, value: Any, least: int, unit: str, most: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int):
            raise OptionError(f"{name} must be a whole number, got {value!r}")
        if value < least:
            unit = unit.removesuffix("s") if least == 1 else unit
            raise OptionError(f"{name} must be at least {least} {unit}".rstrip() + f", got {value:,}")
        if value > most:
            raise OptionError(f"{name} must be at most {most:,} {unit}".rstrip() + f", got {value:,}")

    def _pairs(self, name: str, kinds: tuple[type, ...], words: str) -> None:
        value = getattr(self, name)
        names = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
        if not names or not all(isinstance(item, kinds) for item in value.values()):
            raise OptionError(f"{name} must give {words} for each name, got {value!r}")

    def _instance(self, name: str, kind: type, word: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, kind):
            raise OptionError(f"{name} must be {word}, got {value!r}")

    def _choice(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise OptionError(f"{name} must be one of {', '.join(choices)}; got {value!r}")

    def __getstate__(self) -> dict[str, Any]:
        """For a worker that shares no memory: what to do with records, without where they come from."""
        return {**self.__dict__, "sources": (), "eval_sources": (), "progress": None}

    def recorded(self) -> dict[str, Any]:
        """The options that can change the bytes, as JSON values, for the manifest."""
        found: dict[str, Any] = {}
        for item in fields(self):
            if item.name not in NOT_RECORDED:
                value = getattr(self, item.name)
                found[item.name] = dict(sorted(value.items())) if isinstance(value, Mapping) else value
        return found
