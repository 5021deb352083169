"""Losses and gradient norms of training on packs, beside the same sequences one by one.

    python scripts/loss_curves.py PACKED [--steps 300] [--dtype fp32] [--arms NAME ...] [--output FILE]

Every arm trains the same small Qwen3 from the same weights, on the same packs in the same order, with the
same AdamW: a step is a pack's sequences, its loss their sum over the pack's trained tokens. `one by one` runs
each sequence alone through transformers' own model and adds up the gradients; `packed` is one call of a
prepared model. Two right ways differ by rounding, and training makes that grow: how far two ways without
packing come apart, under another kernel (`one by one, eager`) or as rows of one batch (`padded`), is what
rounding alone does. `mixed` is the packed row without its boundaries: sequences that see each other.

bf16 is autocast over float32 weights, as in transformers' Trainer; fp32 is without TF32. An arm is two rows
of the results, "loss" and "gradient norm" (before it is clipped to 1): `values` has a number for each step,
`value` the last. Where `one by one` was run too, "loss apart" and "gradient norm apart" are the largest
relative difference from it over all steps, in millionths.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench_results import Results

from padless.runtime.attention import BACKENDS
from padless.runtime.format import IGNORE_INDEX
from padless.runtime.models import prepare_model
from padless.runtime.stream import PackedStream
from padless.runtime.varlen_batch import VarlenBatch

SIZES = {"tiny": (64, 128, 2, 4, 2, 16), "small": (512, 1536, 4, 8, 4, 64)}
"""Hidden, MLP, layers, heads, heads of k and v, head size."""
REFERENCE = "one by one"
ARMS = (REFERENCE, "packed", "one by one, eager", "padded", "mixed")
WARM_UP = 20
"""Steps over which the learning rate rises."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all arms have in common."""

    folder: Path
    steps: int
    dtype: str
    size: str
    backend: str
    rate: float
    device: torch.device

    @property
    def case(self) -> str:
        """The rows' case."""
        return f"{self.folder.name}, {self.size}, {self.dtype}, {self.steps} steps"


@dataclass(frozen=True, kw_only=True)
class Curves:
    """A number for each step."""

    losses: list[float]
    norms: list[float]
    seconds: float


def make_model(setting: Setting, vocabulary: int, attention: str) -> Any:
    """Qwen3 with float32 weights, the same for every arm."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    hidden, mlp, layers, heads, kv_heads, head_dim = SIZES[setting.size]
    config = Qwen3Config(
        hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head_dim, vocab_size=vocabulary, tie_word_embeddings=True,
        max_position_embeddings=40_960, attn_implementation=attention,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).to(setting.device).train()


def batches(stream: PackedStream, steps: int) -> Iterator[VarlenBatch]:
    """The packs of all steps, one each, epoch after epoch."""
    epochs = itertools.chain.from_iterable(itertools.repeat(stream))
    return itertools.islice(epochs, steps)


def calls(arm: str, batch: VarlenBatch, device: torch.device) -> Iterator[dict[str, Any]]:
    """What a model is called with in a step."""
    if arm == "packed":
        yield batch.to(device).model_inputs()
        return
    ids, labels = (batch[name].to(device) for name in ("input_ids", "labels"))
    bounds = batch["cu_seq_lens_q"]
    if arm == "mixed":
        yield {"input_ids": ids, "labels": labels, "use_cache": False}
    elif arm == "padded":
        lengths = bounds.diff()
        row, filled = pad_rows(ids, lengths, 0), pad_rows(labels, lengths, IGNORE_INDEX)
        mask = pad_rows(torch.ones_like(ids), lengths, 0)
        yield {"input_ids": row, "labels": filled, "attention_mask": mask, "use_cache": False}
    else:
        for start, end in itertools.pairwise(bounds.tolist()):
            if (batch["labels"][:, start + 1 : end] != IGNORE_INDEX).any():
                yield {"input_ids": ids[:, start:end], "labels": labels[:, start:end], "use_cache": False}


def pad_rows(row: torch.Tensor, lengths: torch.Tensor, value: int) -> torch.Tensor:
    """The sequences of a row [1, T] as rows of their own, filled up to the longest."""
    parts = row[0].split(lengths.tolist())
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=value)


def train(arm: str, setting: Setting) -> Curves:
    """The losses and gradient norms (before they are clipped to 1) of every step."""
    stream = PackedStream(setting.folder, rank=0, world_size=1)
    model = make_model(setting, stream.reader.manifest.vocab_size, "eager" if "eager" in arm else "sdpa")
    if arm == "packed":
        prepare_model(model, attention=setting.backend, liger=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting.rate, betas=(0.9, 0.95), weight_decay=0.1)
    rising = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
    losses, norms = [], []
    begun = time.perf_counter()
    for batch in batches(stream, setting.steps):
        loss = torch.zeros((), dtype=torch.float64, device=setting.device)
        for call in calls(arm, batch, setting.device):
            with torch.autocast(setting.device.type, dtype=torch.bfloat16, enabled=setting.dtype == "bf16"):
                part = model(**call, num_items_in_batch=batch.num_targets).loss
            part.backward()
            loss += part.detach()
        losses.append(loss)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        rising.step()
    return Curves(
        losses=torch.stack(losses).tolist(),
        norms=torch.stack(norms).tolist(),
        seconds=time.perf_counter() - begun,
    )


def apart(these: list[float], those: list[float]) -> float:
    """The largest relative difference over all steps."""
    return max(abs(a - b) / abs(b) for a, b in zip(these, those, strict=True))


def main() -> None:
    """Trains each arm in turn; rows are written as they come."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packed", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=ARMS)
    parser.add_argument("--backend", choices=("auto", *BACKENDS), default="auto", help="of `packed`")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results/loss_curves.jsonl")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a plan for each length, which takes seconds
    setting = Setting(
        folder=options.packed,
        steps=options.steps,
        dtype=options.dtype,
        size=options.size,
        backend=options.backend,
        rate=options.rate,
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
    )
    results = Results(bench="loss_curves", path=options.output)
    curves: dict[str, Curves] = {}
    failed = []
    for arm in options.arms:
        try:
            found = curves[arm] = train(arm, setting)
        except Exception as problem:
            failed.append(f"{arm}: {type(problem).__name__}: {problem}")
            print(failed[-1], flush=True)
            continue
        named = arm if arm != "packed" or setting.backend == "auto" else f"packed, {setting.backend}"
        results.add(setting.case, named, "loss", found.losses[-1], "nats", values=found.losses)
        results.add(setting.case, named, "gradient norm", found.norms[-1], "", values=found.norms)
        results.add(setting.case, named, "seconds", found.seconds, "s")
        if REFERENCE in curves and arm != REFERENCE:
            one = curves[REFERENCE]
            results.add(setting.case, named, "loss apart", apart(found.losses, one.losses) * 1e6, "1e-6")
            results.add(
                setting.case, named, "gradient norm apart", apart(found.norms, one.norms) * 1e6, "1e-6"
            )
    if failed:
        raise SystemExit("; ".join(failed))


if __name__ == "__main__":
    main()
