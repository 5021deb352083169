"""Training steps on a GPU: padded, padding-free as transformers and TRL do it, and packed by padless.

    pack-dataset build alpaca_data.json --tokenizer qwen3/ --template qwen3/chatml.generation.jinja \\
        --max-length 16384 --limit 14000 --output alpaca
    python scripts/make_mixed_rows.py mix.jsonl
    pack-dataset build mix.jsonl --format tokenized --tokenizer packer/demo_data/tokenizer \\
        --max-length 16384 --output mix
    python scripts/bench_training.py alpaca mix [--model NAME] [--arms NAME ...] [--seconds N]

Every arm (scripts/training_arms.py) trains the same architecture, with random weights of the real sizes, in
bf16 with a fused AdamW and an update after every batch, on sequences of the same folder, in a process of its
own: one that runs out of memory says so, and the rest go on. The padded arms have run every shape before the
clock starts (what the first time cost stands beside it), and their batches lie on the device; the packed ones
stream. A row that is there already is not measured again without --fresh, so a run can be taken up again.
Unsloth, which patches what the other arms use, has a script of its own: bench_unsloth.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
from bench_results import Results
from training_arms import ARMS
from training_batches import Batch, Sequence, drawn, packed, padded, sequences_of, streamed, widest
from training_clock import (
    ON_GPU,
    Timed,
    Trainer,
    activation_bytes,
    host_seconds,
    kernel_seconds,
    percentiles,
    time_steps,
)
from training_graph import GraphTrainer, of_few_shapes
from training_models import CHECKPOINTED, MODELS, PEAK, make_model, operations
from training_tables import EPOCH, EPOCH_USEFUL, FULL, PLAIN, SPEED, is_done

WARM_UP = 2
"""Steps of a packed arm before the clock starts, after one with each shape of the packs AHEAD."""
AHEAD = 12
MANY = 64
"""Packs of the static arm among which all shapes are, which are captured before the clock starts."""
PROFILED = 2
"""Steps whose kernels are timed one by one."""
GIB = 2**30


def case_of(options: argparse.Namespace, folder: Path) -> str:
    """What arms are compared within."""
    again = {"on": True, "off": False, "auto": options.model in CHECKPOINTED}[options.checkpointing]
    adapted = f", LoRA {options.lora}" if options.lora else ""
    return f"{options.model}{adapted}, {folder.name}" + (", checkpointed" if again else "")


def label_of(name: str, options: argparse.Namespace) -> str:
    """An arm in the rows; what `prepare` took comes behind it."""
    if ARMS[name].is_padded:
        return f"{name}, {options.rows} rows"
    return name if options.packs == 1 else f"{name}, {options.packs} packs"


def batches_of(
    form: str, batches: list[list[Sequence]], options: argparse.Namespace, folder: Path, device: str
) -> tuple[list[Batch], Iterator[Batch]]:
    """Those to begin with, and those to be timed."""
    if form == "static":
        stream = of_few_shapes(folder, options.packs, device)
        seen = list(itertools.islice(stream, MANY))
        return list({batch.shape_number: batch for batch in seen}.values()), stream
    if form == "packed":
        stream = streamed(folder, options.packs, device)
        # Some of Liger's kernels are compiled for each number of tokens, and packs have a few.
        seen = list(itertools.islice(stream, AHEAD))
        return list({batch.shape: batch for batch in seen}.values()) + seen[:WARM_UP], stream
    every = [padded(batch, device) for batch in batches[: options.steps]]
    return list({batch.shape: batch for batch in reversed(every)}.values())[::-1], iter(every)


def run_arm(name: str, options: argparse.Namespace, folder: Path) -> None:
    """One arm, in this process, as soon as a line comes in."""
    arm, case, label = ARMS[name], case_of(options, folder), label_of(name, options)
    results = Results(bench="bench_training", path=options.output)
    every = sequences_of(folder)
    batches = drawn(every, options.rows, grouped=arm.form == "grouped")
    if not sys.stdin.readline():  # whoever started it has gone
        return
    began = time.perf_counter()
    device = "cuda" if ON_GPU else "cpu"

    def add(metric: str, value: float, unit: str = "") -> None:
        results.add(case, label, metric, value, unit)

    try:
        again = case.endswith(", checkpointed")
        model = make_model(options.model, device, checkpointing=again, lora=options.lora)
        short = packed(every[:3], device)
        how = arm.prepare(model, short, folder)
        label = f"{label}, {how}" if how else label
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        is_static = arm.form == "static"
        optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=ON_GPU, capturable=is_static)
        trainer = (GraphTrainer if is_static else Trainer)(model=model, optimizer=optimizer)
        first, rest = batches_of(arm.form, batches, options, folder, device)
        print(f"  {label}: model and batches after {time.perf_counter() - began:.1f} s", flush=True)
        cold = time_steps(trainer, first, len(first), options.seconds)
        if arm.is_padded:
            seen = {batch.shape for batch in cold.batches}
            rest = itertools.cycle([batch for batch in rest if batch.shape in seen])
        print(f"  {label}: warm after {time.perf_counter() - began:.1f} s", flush=True)
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()
        timed = time_steps(trainer, rest, options.steps, options.seconds)
        add_speed(add, model, timed)
        add("tokens an epoch", sum(len(ids) for ids, _ in every))
        if arm.is_padded:
            add("tokens a second, cold", cold.tokens / cold.seconds, "/s")
            add_epoch(add, timed, batches)
        if ON_GPU:
            add("peak memory", torch.cuda.max_memory_allocated() / GIB, "GiB")
    except torch.OutOfMemoryError as problem:
        print(f"  {str(problem).splitlines()[0]}", flush=True)
        add(FULL, 1)
        return
    same = (padded if arm.is_padded else packed)(widest(drawn(every, options.rows, grouped=False)), device)
    probes: list[Callable[[], None]] = [
        lambda: add_host(add, trainer, first[0] if arm.is_padded else short, timed)
    ]
    if ON_GPU:
        probes += [lambda: add_idle(add, trainer, timed), lambda: add_memory(add, trainer, timed, same)]
    if is_static:  # Python launches nothing, and the graph's memory is its own
        probes = probes[1:2]
    for probe in probes:
        try:
            probe()
        except (RuntimeError, AttributeError) as problem:  # the profiler's, or memory for gradients beside
            print(f"  {label}: {str(problem).splitlines()[0]}", flush=True)
        trainer.optimizer.zero_grad(set_to_none=True)
    print(f"  {label}: done after {time.perf_counter() - began:.1f} s", flush=True)


Add = Callable[..., None]


def add_speed(add: Add, model: torch.nn.Module, timed: Timed) -> None:
    """Tokens, steps and what is derived from them."""
    add(SPEED, timed.tokens / timed.seconds, "/s")
    add(PLAIN, timed.tokens / (timed.seconds - sum(timed.updates)), "/s")
    for metric, value in zip(("step, 10 %", "step", "step, 90 %"), percentiles(timed.steps), strict=True):
        add(metric, value * 1e3, "ms")
    add("steps", len(timed.steps))
    add("tokens a step", timed.tokens / len(timed.steps))
    add("useful", timed.useful, "share")
    work = sum(operations(model, batch.lengths) for batch in timed.batches)
    add("MFU", work / timed.seconds / PEAK, "share")
    add("first loss", timed.first_loss)


def add_epoch(add: Add, timed: Timed, batches: list[list[Sequence]]) -> None:
    """All padded batches of the epoch, each as long as those of its shape took; if all shapes were timed."""
    seconds: dict[tuple[int, ...], list[float]] = {}
    for batch, took in zip(timed.batches, timed.steps, strict=True):
        seconds.setdefault(batch.shape, []).append(took)
    shapes = [(len(batch), max(len(ids) for ids, _ in batch)) for batch in batches]
    if set(shapes) <= set(seconds):
        tokens = sum(len(ids) for batch in batches for ids, _ in batch)
        add(EPOCH, tokens / sum(statistics.fmean(seconds[shape]) for shape in shapes), "/s")
        add(EPOCH_USEFUL, tokens / sum(math.prod(shape) for shape in shapes), "share")


def add_host(add: Add, trainer: Trainer, short: Batch, timed: Timed) -> None:
    """How long Python takes to launch a step, and of the step as it was timed."""
    seconds = host_seconds(trainer, short)
    add("host", seconds * 1e3, "ms")
    add("host share", seconds / percentiles(timed.steps)[1], "share")


def add_idle(add: Add, trainer: Trainer, timed: Timed) -> None:
    """The device's time in kernels against that of the same steps when they were timed."""
    profiled = timed.batches[:PROFILED]
    kernels = kernel_seconds(trainer, profiled)
    busy, wall = sum(kernels.values()), sum(timed.steps[:PROFILED])
    add("idle", 1 - busy / wall, "share")
    for name in sorted(kernels, key=lambda name: -kernels[name])[:15]:
        own = kernels[name]
        print(f"    {own / len(profiled) * 1e3:9.2f} ms a step {own / busy:6.1%}  {name[:90]}", flush=True)


def add_memory(add: Add, trainer: Trainer, timed: Timed, same: Batch) -> None:
    """Activations of the sequences of the widest padded batch, in either form, and of an own step."""
    own = max(timed.batches, key=lambda batch: batch.computed)
    for metric, batch in ((", same sequences", same), ("", own)):
        add(f"activation memory{metric}", activation_bytes(trainer, batch) / GIB, "GiB")
        add(f"tokens{metric or ', activation memory'}", batch.tokens)


def start(name: str, folder: Path, options: argparse.Namespace) -> subprocess.Popen[str]:
    """A process for one arm, which loads what it needs and waits for its turn."""
    command = [sys.executable, *sys.argv, "--here", name, "--folder", str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packed", type=Path, nargs="+")
    parser.add_argument("--model", choices=MODELS, default="qwen3-0.6b")
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=list(ARMS))
    parser.add_argument("--rows", type=int, default=8, help="sequences of a padded batch")
    parser.add_argument("--packs", type=int, default=1, help="packs of a packed batch")
    parser.add_argument("--steps", type=int, default=100, help="timed ones, at most")
    parser.add_argument("--seconds", type=float, default=30, help="of timed steps, at most")
    parser.add_argument("--limit", type=float, default=180, help="seconds of a whole arm, at most")
    parser.add_argument("--checkpointing", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--lora", type=int, default=0, help="the adapters' rank; 0 trains all weights")
    parser.add_argument("--fresh", action="store_true", help="measure what is there already again")
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results" / "bench_training.jsonl"
    )
    parser.add_argument("--here", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Run each arm in a process of its own, the next of which loads its libraries meanwhile."""
    options = parse()
    if options.here:
        run_arm(options.here, options, options.folder)
        return
    rows = options.output.read_text().splitlines() if options.output.exists() else []
    measured = [json.loads(row) for row in rows]
    wanted = [
        (name, folder)
        for folder in options.packed
        for name in options.arms
        if options.fresh or not is_done(case_of(options, folder), label_of(name, options), measured)
    ]
    failed = []
    waiting = start(*wanted[0], options) if wanted else None
    for number, (name, folder) in enumerate(wanted):
        running = waiting
        assert running is not None
        waiting = start(*wanted[number + 1], options) if number + 1 < len(wanted) else None
        try:
            _, told = running.communicate("go\n", timeout=options.limit)
        except subprocess.TimeoutExpired:
            running.kill()
            _, told = running.communicate()
            told += f"\nit took more than {options.limit:.0f} s"
        if running.returncode:
            lines = told.strip().splitlines()
            failed.append(f"{name} on {folder.name}: {lines[-1] if lines else running.returncode}")
            print("\n".join(lines[-12:]), flush=True)
            print(f"failed: {failed[-1]}", flush=True)
    if failed:
        raise SystemExit("; ".join(failed))


if __name__ == "__main__":
    main()
