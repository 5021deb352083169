"""Rows of a benchmark: one JSON line a measurement, appended, with what it ran on.

Raw values are kept and tables are made from them by a script: a figure can be traced to its runs.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = (
    "padless",
    "fastokens",
    "tokenizers",
    "pyarrow",
    "datasets",
    "transformers",
    "trl",
    "torch",
    "triton",
    "liger-kernel",
    "flash-attn",
    "flash-attn-4",
    "xformers",
    "unsloth",
    "unsloth_zoo",
)


@cache
def hardware() -> str:
    """Cores that this process may use, processor and memory, in words; the GPU where torch is in use."""
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        os.uname().machine,
    )
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    torch = sys.modules.get("torch")
    gpu = f"{torch.cuda.get_device_name()}; " if torch and torch.cuda.is_available() else ""
    return f"{gpu}{len(os.sched_getaffinity(0))} x {model}, {gib:.0f} GiB"


@cache
def versions() -> dict[str, str]:
    """Python and the packages that decide the figures."""
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    return found


@dataclass(frozen=True, kw_only=True)
class Results:
    """Where the rows of one benchmark go; each is printed as well."""

    bench: str
    path: Path

    def add(
        self, case: str, arm: str, metric: str, value: float, unit: str, *, values: Sequence[float] = ()
    ) -> None:
        """One row; `case` names the input and the setting, `arm` who did it.

        `values` are those of a curve, such as of all steps, and `value` what is said of it in one number.
        """
        row = {"bench": self.bench, "case": case, "arm": arm, "metric": metric}
        measured: dict[str, object] = {"value": round(value, 4), "unit": unit}
        if values:
            measured["values"] = [float(f"{one:.9g}") for one in values]
        context = {"hardware": hardware(), "versions": versions(), "date": str(date.today())}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as out:
            out.write(json.dumps(row | measured | context) + "\n")
        print(f"{case:34} {arm:20} {metric:22} {value:14,.3f} {unit}", flush=True)
