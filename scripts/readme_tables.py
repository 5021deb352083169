"""The README's tables of figures, made from the raw rows in scripts/results/.

python scripts/readme_tables.py            writes them into the README, between their marks
python scripts/readme_tables.py --check    exits 1 where the README says something else
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rank_tables import loss_curves, ranks_idle
from training_tables import training_speed

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "scripts" / "results"
README = ROOT / "README.md"
Rows = list[dict[str, Any]]


def read_rows(name: str) -> Rows:
    """All rows of one benchmark; the last of equal measurements stands."""
    path = RESULTS / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def pack_speed(rows: Rows) -> str:
    """Whole processes: padless against both peers, and padless alone at several sizes."""
    last = {(row["case"], row["arm"], row["metric"]): row["value"] for row in rows}
    cases = list(dict.fromkeys(row["case"] for row in rows))
    lines = ["| input | padless | TRL's way | tuned | ratio of medians |", "|---|---|---|---|---|"]
    for case in cases:
        own = last.get((case, "padless", "wall_median"))
        if own is None:
            continue
        peers = [last.get((case, arm, "wall_median")) for arm in ("trl", "trl_tuned")]
        times = " | ".join("-" if peer is None else f"{peer:.1f} s" for peer in peers)
        ratios = " / ".join("-" if peer is None else f"{peer / own:.1f}" for peer in peers)
        lines.append(f"| {case} | {own:.2f} s | {times} | {ratios} |")
    lines += [
        "",
        "| input | records/s | tokens/s | anonymous memory | with mapped files |",
        "|---|---|---|---|---|",
    ]
    for case in cases:
        if (case, "padless", "peak_pss") not in last:
            continue
        speed, tokens, anonymous, everything = (
            last[case, "padless", metric]
            for metric in ("records_per_second", "tokens_per_second", "peak_anonymous_pss", "peak_pss")
        )
        lines.append(
            f"| {case} | {speed:,.0f} | {tokens / 1e6:.1f} M | {anonymous:,.0f} MB | {everything:,.0f} MB |"
        )
    told = rows[-1]
    versions = ", ".join(f"{name} {version}" for name, version in told["versions"].items())
    return "\n".join([*lines, "", f"{told['hardware']}; {versions}; {told['date']}."])


def plan_speed(rows: Rows) -> str:
    """Plans of a million lengths and more beside peers' loops, and of real lengths against the bound."""
    last = {(row["case"], row["arm"], row["metric"]): row["value"] for row in rows}
    over = {
        (case, arm): value - last[case, arm, "bound_packs"]
        for (case, arm, metric), value in last.items()
        if metric == "packs"
    }
    lines = ["| lengths | plan | seconds | full | packs over the bound |", "|---|---|---|---|---|"]
    for (case, arm), more in over.items():
        if case.startswith("lognormal"):
            seconds, used = last[case, arm, "seconds"], last[case, arm, "utilization"]
            lines.append(f"| {case} | {arm} | {seconds:.3f} | {used:.3%} | {more:,.0f} |")
    names = ("bfd", "spread", "optimal", "ordered")
    lines += ["", f"| real lengths | bound | {' | '.join(names)} |", "|---|---|---|---|---|---|"]
    real = [key for key in over if not key[0].startswith("lognormal")]
    for case, arm in real:
        name, _, cap = arm.partition(",")
        if name == "bfd" and case.startswith("alpaca_data.json qwen3_chatml_total"):
            arms = [f"{name}{cap and f',{cap}'}" for name in names]
            cells = [f"+{over[case, arm]:,.0f}, {last[case, arm, 'seconds'] * 1e3:.0f} ms" for arm in arms]
            told = f"alpaca, ChatML, {case.split('total ')[1]}{cap and f',{cap}'}"
            lines.append(f"| {told} | {last[case, arm, 'bound_packs']:,.0f} | {' | '.join(cells)} |")
    full = [key for key in real if key[1].startswith(("spread", "optimal"))]
    reached = sum(over[key] == 0 for key in full)
    slowest = max(last[*key, "seconds"] for key in full) * 1e3
    lines += [
        "",
        "`spread` and `optimal` over both files, two templates, four lengths, with and without a cap of 64:",
        f"the bound in {reached} of {len(full)} plans, the slowest in {slowest:.0f} ms.",
    ]
    stamp = rows[-1]
    place = f"{stamp['hardware']}; python {stamp['versions']['python']}; {stamp['date']}."
    return "\n".join([*lines, "", place])


def rope_speed(rows: Rows) -> str:
    """Rotation of q and k, forward, and norm with rotation, both ways: padless against the peers."""
    last = {(row["case"], row["arm"], row["metric"]): row["value"] for row in rows}
    cases = list(dict.fromkeys(row["case"] for row in rows))

    def cell(case: str, arm: str, metric: str, unit: str = " us") -> str:
        value = last.get((case, arm, metric))
        return "-" if value is None else f"{value:,.1f}{unit}" if unit else f"{value:.1%}"

    def measured(*arms: str, metric: str) -> list[str]:
        return [arm for arm in arms if any(key[1:] == (arm, metric) for key in last)]

    peers = measured("Liger", "Unsloth", "HF compiled", "HF eager", metric="of copy")
    head = ("forward", "padless", "of a copy", "launched from Python", *peers)
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    own = "padless cu_seqlens"
    for case in cases:
        if (case, own, "graph") in last:
            mine = (cell(case, own, "graph"), cell(case, own, "of copy", ""), cell(case, own, "eager"))
            theirs = (f"{cell(case, peer, 'graph')} / {cell(case, peer, 'eager')}" for peer in peers)
            lines.append(f"| {' | '.join((case, *mine, *theirs))} |")
    normed = ("padless gathered", "padless", "Unsloth frozen", "Unsloth trained", "HF compiled", "HF eager")
    arms = measured(*normed, metric="both ways graph")
    names = [{"padless": "padless cu_seqlens"}.get(arm, arm) for arm in arms]
    lines += ["", f"| forward and backward | {' | '.join(names)} |", "|---" * (len(arms) + 1) + "|"]
    for case in cases:
        if (case, "padless", "both ways graph") in last:
            times = (cell(case, arm, "both ways graph") for arm in arms)
            lines.append(f"| {' | '.join((case, *times))} |")
    told = rows[-1]
    wanted = ("torch", "triton", "transformers", "liger-kernel", "unsloth")
    versions = ", ".join(f"{name} {told['versions'][name]}" for name in wanted if name in told["versions"])
    return "\n".join([*lines, "", f"{told['hardware']}; {versions}; {told['date']}."])


def attention_speed(rows: Rows) -> str:
    """Varlen attention, forward and both ways: the backends beside the floor, and what `auto` takes."""
    last = {(row["case"], row["arm"], row["metric"]): row["value"] for row in rows}
    known = ("floor", "short", "flash_attn_4", "flash", "flex", "efficient")
    arms = [arm for arm in known if any(key[1:] == (arm, "both ways") for key in last)]

    def cell(case: str, arm: str) -> str:
        times = (last.get((case, arm, metric)) for metric in ("forward", "both ways"))
        return " / ".join("-" if time is None else f"{time:,.0f}" for time in times) + " us"

    lines = [f"| forward / both ways | {' | '.join(arms)} | auto takes |", "|---|" + "---|" * (len(arms) + 1)]
    for case in dict.fromkeys(row["case"] for row in rows):
        if (case, "floor", "forward") not in last:
            continue
        picked = [row for row in rows if row["case"] == case and row["metric"] == "both ways, of fastest"]
        told = "-"
        if picked:
            told = f"{picked[-1]['arm'].removeprefix('auto: ')}, {picked[-1]['value']:.2f} x the fastest"
        lines.append(f"| {' | '.join((case, *(cell(case, arm) for arm in arms), told))} |")
    hosts = ", ".join(f"{arm} {last['T=256', arm, 'host']:.0f} us" for arm in arms[1:])
    lines += ["", f"Host time of a forward call: {hosts}."]
    turned = [arm for arm in dict.fromkeys(row["arm"] for row in rows) if arm.startswith("rope + ")]
    if turned:
        lines += [
            "",
            f"| rotation too | fused | {' | '.join(turned)} |",
            "|---|" + "---|" * (len(turned) + 1),
        ]
        for case in dict.fromkeys(row["case"] for row in rows if row["arm"] == "fused"):
            if (case, "fused", "both ways") in last:
                lines.append(f"| {' | '.join((case, *(cell(case, arm) for arm in ('fused', *turned))))} |")
    about = rows[-1]
    wanted = ("torch", "triton", "flash-attn-4")
    versions = ", ".join(f"{name} {about['versions'][name]}" for name in wanted)
    return "\n".join([*lines, "", f"{about['hardware']}; {versions}; {about['date']}."])


def stream_speed(rows: Rows) -> str:
    """Tokens a second into ready batches, one process: padless against the loaders of trainers."""
    last = {(row["case"], row["arm"], row["metric"]): row["value"] for row in rows}
    lines = [
        "| packs of tokens a batch | padless | TRL's loader | flattening collator | memcpy | times TRL |",
        "|---|---|---|---|---|---|",
    ]
    for case in sorted({case for case, arm, _ in last if arm == "trl"}):
        speeds = (last[case, arm, "tokens per second"] for arm in ("padless", "trl", "flattening", "memcpy"))
        told = " | ".join(f"{speed / 1e6:,.1f} M/s" for speed in speeds)
        lines.append(f"| {case} | {told} | {last[case, 'padless', 'times trl']:.0f} |")
    about = rows[-1]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return "\n".join([*lines, "", f"{about['hardware']}; {versions}; {about['date']}."])


def trainers(rows: Rows) -> str:
    """Which trainers ran, at which version and how, and how far losses are from those of single sequences."""
    last = {(row["arm"], row["metric"]): row for row in rows}
    lines = [
        "| trainer | what ran | sequences | losses apart, at most | if sequences were mixed |",
        "|---|---|---|---|---|",
    ]
    for arm in dict.fromkeys(row["arm"] for row in rows):
        _, _, how = arm.partition(": ")
        sequences, apart, mixed = (
            last.get((arm, metric)) for metric in ("sequences", "loss_apart", "loss_apart_mixed")
        )
        assert sequences is not None
        # An arm is an example, or an environment and what its tests ran.
        ran = how or f"`scripts/examples/{arm}.py`, its own loop"
        losses = (
            "read to the token | -"
            if apart is None or mixed is None
            else f"{max(apart['value'] * 1e-6, 1e-10):.0e} | {mixed['value']:.1g}"  # rows keep no more digits
        )
        version = sequences["case"].partition("+")[0]
        lines.append(f"| {version} | {ran} | {sequences['value']:.0f} | {losses} |")
    return "\n".join([*dict.fromkeys(lines), "", f"{rows[-1]['date']}, on a CPU."])


TABLES: dict[str, Callable[[Rows], str]] = {
    "trainers": trainers,
    "stream": stream_speed,
    "bench_pack": pack_speed,
    "bench_plan": plan_speed,
    "bench_rope": rope_speed,
    "bench_attention": attention_speed,
    "bench_training": training_speed,
    "loss_curves": loss_curves,
    "bench_ranks": ranks_idle,
}


def with_tables(text: str) -> str:
    """The README's text with every table made anew."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name}: made by scripts/readme_tables.py -->\n", f"<!-- end {name} -->"
        head, found, rest = text.partition(begin)
        rows = read_rows(name)
        if found and rows:
            text = head + begin + table(rows) + "\n" + end + rest.partition(end)[2]
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args()
    text = README.read_text(encoding="utf-8")
    made = with_tables(text)
    if options.check:
        sys.exit("README.md is not what scripts/results/ says" if made != text else 0)
    README.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
