"""A data set on the Hub: which of its files make a subset's split, and where they are read from.

One request lists the repository at one commit, with sizes and checksums, so nothing has to be fetched to
name what is read. Which file belongs to which split is told as `datasets` tells it, in this order: the
`configs` of the dataset card, the Hub's own Parquet conversion, `NAME-00000-of-00001` file names, and the
words train, validation and test in the names. padless reads the files with its own readers, as streams:
that needs neither `datasets` nor room on the disk, and runs nobody's code.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import unquote

from padless.packer.errors import InputError
from padless.packer.hub import PREFIX, hub_api, refuse
from padless.packer.sources.chunks import SourceFile
from padless.packer.sources.splits import choose_splits, named_split

Splits = dict[str, list[str]]
Kind = Callable[[str], tuple[str | None, str | None]]

_CONVERTED = re.compile(r"([^/]+)/([^/]+)/\d{4,}\.parquet")
_SHARDED = re.compile(r"(?:.*/)?(\w+(?:\.\w+)*)-\d{5,}-of-\d{5,}(?:-\w+)?\.[\w.]+")
_ABOUT = ("dataset_infos.json", "dataset_info.json", "state.json", "dataset_dict.json")


def hub_files(
    name: str, kind_of: Kind, *, split: str | None, subset: str | None, revision: str | None, is_eval: bool
) -> list[SourceFile]:
    """The files of the splits of a data set that are asked for, split by split in the order of their names.

    `kind_of` gives a file name's kind (None: not read) and compression. Raises InputError where the Hub
    does not let us, and where there is no such subset or split.
    """
    info = _listing(name, revision)
    siblings = {item.rfilename: item for item in info.siblings or ()}
    known = [path for path in sorted(siblings) if kind_of(path)[0] and path.split("/")[-1] not in _ABOUT]
    readable = [path for path in known if not any(part.startswith(".") for part in path.split("/"))]
    configs = (info.card_data.get("configs") if info.card_data else None) or ()
    subsets = _by_card(configs, readable, kind_of) or _by_names(readable, kind_of)
    if not any(files for splits in subsets.values() for files in splits.values()):
        listed = ", ".join(sorted(siblings)[:8]) or "no file at all"
        raise InputError(
            f"{name} has no file that padless reads ({listed}), and a script of a data set is never run: try "
            "the Hub's own conversion, --revision refs/convert/parquet, or download and convert it"
        )
    subset = _subset(name, subsets, configs, subset)
    chosen = choose_splits(subsets[subset], split, f"{name}, subset {subset}", is_eval)
    return [
        _source(name, info.sha, siblings[path], kind_of, part)
        for part in chosen
        for path in subsets[subset][part]
    ]


def hub_paths(url: str, kind_of: Kind) -> list[SourceFile]:
    """The files that hf://datasets/ORG/NAME@REVISION/PATH names: one, or by a pattern or a folder.

    Without a path it is as ORG/NAME. Raises InputError as `hub_files` does.
    """
    from fsspec.utils import glob_translate

    found = re.fullmatch(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.*))?", url)
    if found is None:
        raise InputError(
            f"{url} is no address of data on the Hub: hf://datasets/ORG/NAME@REVISION/PATH is one"
        )
    name, revision, path = found[1], found[2] and unquote(found[2]), (found[3] or "").strip("/")
    if not path:
        return hub_files(name, kind_of, split=None, subset=None, revision=revision, is_eval=False)
    info = _listing(name, revision)
    siblings = {item.rfilename: item for item in info.siblings or ()}
    matches = re.compile(glob_translate(path)).fullmatch
    chosen = [one for one in sorted(siblings) if one == path or matches(one)]
    chosen = chosen or [one for one in sorted(siblings) if one.startswith(f"{path}/") and kind_of(one)[0]]
    unknown = next((one for one in chosen if kind_of(one)[0] is None), None)
    if unknown is not None or not chosen:
        listed = ", ".join(sorted(siblings)[:8]) or "no file at all"
        why = f"is no file that padless reads ({unknown})" if unknown else "is not there"
        raise InputError(f"{url} {why}; {name} has {listed}")
    return [_source(name, info.sha, siblings[one], kind_of, "") for one in chosen]


def _listing(name: str, revision: str | None) -> Any:
    """What the Hub says of a data set and of its files; raises InputError."""
    try:
        return hub_api().dataset_info(name, revision=revision, files_metadata=True)
    except Exception as error:
        what = f"the data set {name}" + (f" at revision {revision}" if revision else "")
        page, download = f"https://huggingface.co/datasets/{name}", f"hf download --repo-type dataset {name}"
        refuse(error, what, page, download)


def _source(name: str, commit: str, item: Any, kind_of: Kind, split: str) -> SourceFile:
    kind, compression = kind_of(item.rfilename)
    return SourceFile(
        path=f"{PREFIX}datasets/{name}@{commit}/{item.rfilename}",
        name=f"{PREFIX}datasets/{name}/{item.rfilename}",
        kind=kind or "",
        split=split,
        compression=compression,
        revision=commit,
        bytes=item.size or 0,
        size=item.size or 0,
        checksum=f"sha256:{item.lfs.sha256}" if item.lfs else f"git-sha1:{item.blob_id}",
    )


def _subset(name: str, subsets: Mapping[str, Splits], configs: Iterable[Any], subset: str | None) -> str:
    if subset is None:
        marked = [str(item.get("config_name")) for item in configs if item.get("default")]
        names = [*marked, "default", *(subsets if len(subsets) == 1 else ())]
        subset = next((item for item in names if item in subsets), None)
        if subset is None:
            raise InputError(f"{name} has several subsets; choose one with --subset: {', '.join(subsets)}")
    if subset not in subsets:
        raise InputError(f"{name} has no subset {subset!r}; it has: {', '.join(subsets)}")
    return subset


def _by_card(configs: Iterable[Mapping[str, Any]], paths: list[str], kind_of: Kind) -> dict[str, Splits]:
    """Subsets as the card's YAML gives them: data_files (patterns, or patterns by split) or a data_dir."""
    from fsspec.utils import glob_translate

    found: dict[str, Splits] = {}
    for config in configs:
        name, folder = str(config.get("config_name", "default")), str(config.get("data_dir") or "")
        below = f"{folder.strip('./')}/" if folder.strip("./") else ""
        listed = config.get("data_files")
        if listed is None:
            inside = {path[len(below) :]: path for path in paths if path.startswith(below)}
            by_name = _by_words(list(inside), kind_of)
            found[name] = {split: [inside[path] for path in files] for split, files in by_name.items()}
            continue
        if isinstance(listed, Mapping):
            listed = [{"split": split, "path": path} for split, path in listed.items()]
        for item in [listed] if isinstance(listed, str) else listed:
            patterns = item.get("path") if isinstance(item, Mapping) else item
            split = str(item.get("split", "train")) if isinstance(item, Mapping) else "train"
            files = found.setdefault(name, {}).setdefault(split, [])
            for pattern in [patterns] if isinstance(patterns, str) else patterns or ():
                matches = re.compile(glob_translate(below + str(pattern).removeprefix("./"))).fullmatch
                files += [path for path in paths if matches(path) and path not in files]
    return found


def _by_names(paths: list[str], kind_of: Kind) -> dict[str, Splits]:
    """Subsets of a repository whose card says nothing; all but the Hub's conversions have one."""
    converted = [_CONVERTED.fullmatch(path) for path in paths]
    if not paths or not all(converted):
        return {"default": _by_words(paths, kind_of)}
    found: dict[str, Splits] = {}
    for match in converted:
        if match:
            found.setdefault(match[1], {}).setdefault(match[2], []).append(match[0])
    return found


def _by_words(paths: list[str], kind_of: Kind) -> Splits:
    kinds = Counter(kind_of(path)[0] for path in paths)
    if len(kinds) > 1:  # notes and samples beside the data; the most frequent kind is the data's
        rank = ("parquet", "json", "csv", "text").index
        most = min(kinds, key=lambda kind: (-kinds[kind], rank(kind or "text")))
        paths = [path for path in paths if kind_of(path)[0] == most]
    sharded = [(match[1], path) for path in paths if (match := _SHARDED.fullmatch(path))]
    found: Splits = {}
    if len(sharded) == len(paths):
        for split, path in sharded:
            found.setdefault(split, []).append(path)
        return found
    for path in paths:
        split = named_split(path)
        if split is not None:
            found.setdefault(split, []).append(path)
    return found or {"train": paths}
