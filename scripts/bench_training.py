"""Training steps on a GPU: padded, padding-free as transformers does it, and packed by padless.

    python scripts/bench_training.py PACKED [--model NAME] [--arms NAME ...] [--steps N] [--record]

PACKED is a packed folder. Every arm trains the same architecture, with random weights of the real sizes, on
sequences of that folder: throughput and memory do not depend on what the weights have learned. `padded` has
rows of single sequences in drawn order, filled up to the longest of their batch, under SDPA; `transformers`
has the packs, with the boundaries and SDPA that transformers gives them by itself; `padless` the packs and
`prepare_model`; `padless liger` its norms, MLP and loss from Liger too. Steps of an arm hold about the same
number of real tokens as those of the others. Every arm runs in a process of its own, so that one which runs
out of memory says so and the rest go on.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_results import Results

from padless.runtime.models import prepare_model
from padless.runtime.reader import PackedReader
from padless.runtime.stream import PackedStream

MODELS = {
    # hidden, MLP, layers, heads, KV heads, head size, vocabulary
    "tiny": (64, 128, 2, 4, 2, 16, 4_096),
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, 128, 151_936),
    "qwen3-1.7b": (2048, 6144, 28, 16, 8, 128, 151_936),
    "qwen3-4b": (2560, 9728, 36, 32, 8, 128, 151_936),
    "qwen3-8b": (4096, 12288, 36, 32, 8, 128, 151_936),
}
"""Sizes of the published configurations; 4B and smaller tie their embeddings."""
WARM_UP = 5
PEAK = 989e12
"""Dense bf16 operations a second of an H100 or H200."""

Batch = dict[str, Any]


def make_model(name: str, device: str) -> Any:
    """Qwen3 of that size, random weights, bf16 on a GPU; the same for every arm."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    hidden, mlp, layers, heads, kv_heads, head_dim, vocabulary = MODELS[name]
    config = Qwen3Config(
        hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head_dim, vocab_size=vocabulary,
        tie_word_embeddings=name != "qwen3-8b", max_position_embeddings=40_960, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
        model = Qwen3ForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def padded_batches(path: Path, rows: int, seed: int, device: str) -> Iterator[tuple[Batch, int]]:
    """Batches of single sequences and their real tokens; pages of a book in drawn order."""
    reader = PackedReader(path)
    sequences = [
        (pack.input_ids[end - n : end], pack.labels[end - n : end])
        for pack in (reader[number] for number in range(min(len(reader), 4000)))
        for n, end in zip(pack.seq_lengths.tolist(), np.cumsum(pack.seq_lengths).tolist(), strict=True)
    ]
    order = np.random.default_rng(seed).permutation(len(sequences))
    for first in range(0, len(order) - rows + 1, rows):
        chosen = [sequences[number] for number in order[first : first + rows]]
        longest = max(len(ids) for ids, _ in chosen)
        ids = torch.zeros(rows, longest, dtype=torch.int64)
        labels = torch.full((rows, longest), -100)
        mask = torch.zeros(rows, longest, dtype=torch.int64)
        for row, (tokens, wanted) in enumerate(chosen):
            ids[row, : len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
            labels[row, : len(tokens)] = torch.from_numpy(wanted.astype(np.int64))
            mask[row, : len(tokens)] = 1
        batch = {"input_ids": ids, "labels": labels, "attention_mask": mask}
        yield (
            {name: x.to(device, non_blocking=True) for name, x in batch.items()} | {"use_cache": False},
            int(mask.sum()),
        )


def packed_batches(path: Path, packs: int, seed: int, device: str) -> Iterator[tuple[Batch, int]]:
    """padless' own batches and their tokens."""
    for batch in PackedStream(path, packs_per_batch=packs, seed=seed, rank=0, world_size=1):
        yield batch.to(device).model_inputs(), batch["input_ids"].shape[1]


def operations(model: Any, tokens: int, cost: float) -> float:
    """Of a step: six for each weight and token, two more for a forward done again, and attention's."""
    config = model.config
    weights = sum(p.numel() for p in model.parameters())
    if not config.tie_word_embeddings:  # the input's embeddings are looked up, not multiplied
        weights -= config.vocab_size * config.hidden_size
    width = config.num_attention_heads * config.head_dim
    return 8 * weights * tokens + 8 * 2 * config.num_hidden_layers * width * cost


def measure(
    model: Any, batches: Iterator[tuple[Batch, int]], steps: int, seconds: float, device: str
) -> dict[str, float]:
    """Real tokens a second, the median step, peak memory, the first loss, over steps after a warm-up."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=device == "cuda")
    synchronize: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    times: list[float] = []
    tokens = padded = 0
    first_loss = None
    work = 0.0
    started = time.perf_counter()
    for number, (batch, real) in enumerate(batches):
        if number == WARM_UP:
            synchronize()
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize()
        if first_loss is None:
            first_loss = loss.item()
        if number >= WARM_UP:
            times.append(time.perf_counter() - begin)
            tokens += real
            padded += batch["input_ids"].numel()
            bounds = batch.get("cu_seq_lens_q")
            lengths = bounds.diff() if bounds is not None else batch["attention_mask"].sum(1)
            work += operations(model, real, float((lengths.double() ** 2).sum()) / 2)
        if len(times) >= steps or time.perf_counter() - started > seconds:
            break
    if not times or first_loss is None:
        raise SystemExit("too few batches, or too little time, for a step after the warm-up")
    found = {
        "tokens a second": tokens / sum(times),
        "step": statistics.median(times) * 1e3,
        "steps": len(times),
        "useful": tokens / padded,
        "MFU": work / sum(times) / PEAK,
        "first loss": first_loss,
    }
    if device == "cuda":
        found["peak memory"] = torch.cuda.max_memory_allocated() / 2**30
    return found


UNITS = {
    "tokens a second": "/s",
    "step": "ms",
    "useful": "share",
    "MFU": "share",
    "peak memory": "GiB",
}
ARMS = ("padded", "transformers", "padless", "padless liger")


def run_arm(arm: str, options: argparse.Namespace, results: Results) -> None:
    """One arm, in this process."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model(options.model, device)
    name = options.packed.name
    if arm == "padded":
        batches = padded_batches(options.packed, options.rows, 0, device)
        case = f"{options.model}, {name}, {options.rows} rows"
    else:
        if arm.startswith("padless"):
            prepare_model(model, liger=arm == "padless liger", data=options.packed)
        batches = packed_batches(options.packed, options.packs, 0, device)
        case = f"{options.model}, {name}, {options.packs} packs"
    for metric, value in measure(model, batches, options.steps, options.seconds, device).items():
        results.add(case, arm, metric, value, UNITS.get(metric, ""))


def main() -> None:
    """Reads the options and runs each arm in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packed", type=Path)
    parser.add_argument("--model", choices=MODELS, default="qwen3-0.6b")
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=ARMS)
    parser.add_argument("--rows", type=int, default=8, help="sequences of a padded batch")
    parser.add_argument("--packs", type=int, default=1, help="packs of a packed batch")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60, help="of an arm, at most")
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results" / "bench_training.jsonl"
    )
    parser.add_argument("--here", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        run_arm(options.here, options, Results(bench="bench_training", path=options.output))
        return
    failed = []
    for arm in options.arms:
        run = subprocess.run([sys.executable, *sys.argv, "--here", arm], stderr=subprocess.PIPE, text=True)
        if run.returncode:
            lines = run.stderr.strip().splitlines()
            failed.append(f"{arm}: {lines[-1] if lines else run.returncode}")
            print(f"{arm} failed: {failed[-1]}", flush=True)
    if failed:
        raise SystemExit("; ".join(failed))


if __name__ == "__main__":
    main()
