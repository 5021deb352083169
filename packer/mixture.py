"""What a mix was asked for, beside what came of it: shares of each argument of the build.

The manifest has the weights by argument (a file, or all files of a glob); the sequence table has the rest. A
share is counted as the mix counts: in tokens, in trained tokens, or in records, of which each time counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from padless.packer.measure import PerSource
from padless.runtime.format import Manifest

UNITS = {"records": "records", "tokens": "tokens", "trained": "trained tokens"}
_FILES = 40


def mixture(manifest: Manifest, sources: Sequence[PerSource]) -> dict[str, Any] | None:
    """Shares asked for (None without weights) and given, an entry an argument; None where nothing was mixed.

    Options that are none of a mix (of folders repacked together, say) count as none.
    """
    mix, arguments = manifest.options.get("mix"), manifest.options.get("source_arguments")
    if not isinstance(mix, dict) or not isinstance(arguments, list) or mix.get("by") not in UNITS:
        return None
    weights = mix.get("weights")
    if len(arguments) != len(sources) or any(type(number) is not int or number < 0 for number in arguments):
        return None
    if weights is not None and not _are_weights(weights, max(arguments, default=-1) + 1):
        return None
    groups: dict[int, list[int]] = {}
    for number, argument in enumerate(arguments):
        groups.setdefault(argument, []).append(number)
    amount = {"records": "drawn", "tokens": "tokens", "trained": "trained"}[mix["by"]]
    given = {
        argument: sum(getattr(sources[number], amount) for number in mine)
        for argument, mine in groups.items()
    }
    return {
        "by": mix["by"],
        "target": mix.get("target"),
        "max_repeats": mix.get("max_repeats"),
        "arguments": [
            {
                "sources": [manifest.sources[number].path for number in mine[:_FILES]],
                "files": len(mine),
                "weight": None if weights is None else weights[argument],
                "asked": None if weights is None else weights[argument] / sum(weights),
                "amount": given[argument],
                "share": given[argument] / max(1, sum(given.values())),
            }
            for argument, mine in sorted(groups.items())
        ],
    }


def _are_weights(weights: Any, count: int) -> bool:
    """Whether they are numbers, one for each argument, that make shares."""
    return (
        isinstance(weights, list)
        and len(weights) >= count
        and all(type(weight) in (int, float) and 0 <= weight < 1e300 for weight in weights)
        and sum(weights) > 0
    )
