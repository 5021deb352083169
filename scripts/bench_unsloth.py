"""Training steps of Unsloth on a GPU: an arm for bench_training.py, whose libraries it cannot share.

    python scripts/bench_unsloth.py PACKED ... [--model NAME] [--steps N] [--seconds N]

Its wheels (`pip install unsloth`, with transformers 5.17 at most) patch transformers as they are imported, so
this is a process of its own. The model of bench_training.py, with the same weights, is saved and loaded by
`FastLanguageModel`; the packs are the same, as Unsloth's collator gives them with `packing=True`: positions
that begin again and `packed_seq_lengths`. All weights are trained, for which Unsloth compiles transformers'
layers (its own layers serve LoRA). Attention is the best that it finds: flash-attn, xformers, PyTorch's.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "UNSLOTH_DISABLE_STATISTICS"):
    os.environ.setdefault(name, "1")
# It writes the modules that it compiles; without this, into the working folder.
os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", os.path.join(tempfile.gettempdir(), "unsloth_compiled"))

import unsloth  # noqa: E402, I001  before transformers, as it asks
import datasets  # noqa: E402
import torch  # noqa: E402
from bench_results import Results  # noqa: E402
from bench_training import GIB, WARM_UP, add_speed, case_of, parse  # noqa: E402
from training_batches import Batch, streamed  # noqa: E402
from training_clock import ON_GPU, Timed, Trainer, time_steps  # noqa: E402
from training_models import make_model  # noqa: E402
from unsloth.utils import flash_impl, hf_packed_attention  # noqa: E402
from unsloth.utils.packing import enable_sample_packing  # noqa: E402

TOKENS = 40_960
"""Of a row at most."""


class Collator:
    """A batch as it comes, for Unsloth to wrap."""

    def torch_call(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Ids, labels and positions [1, tokens]."""
        return {key: rows[0][key] for key in ("input_ids", "labels", "position_ids")}


def load(name: str, folder: Path, device: str, *, checkpointing: bool) -> Any:
    """bench_training's model, saved and loaded by Unsloth."""
    with tempfile.TemporaryDirectory() as saved:
        shutil.copytree(folder / "tokenizer", saved, dirs_exist_ok=True)
        make_model(name, device, checkpointing=False).save_pretrained(saved)
        model, _ = unsloth.FastLanguageModel.from_pretrained(
            saved,
            max_seq_length=TOKENS,
            dtype=torch.bfloat16 if ON_GPU else torch.float32,
            load_in_4bit=False,
            full_finetuning=True,
            use_gradient_checkpointing=checkpointing,
        )
    return model.train()


def wrapped(model: Any, folder: Path) -> SimpleNamespace:
    """What Unsloth does to TRL's trainer for `packing=True`: its collator, and attention while it trains."""
    trainer = SimpleNamespace(
        model=model,
        data_collator=Collator(),
        train_dataset=datasets.load_from_disk(str(folder)),
        args=SimpleNamespace(),
        train=lambda steps: steps(),
    )
    enable_sample_packing(model, trainer)
    return trainer


def batches_of(collator: Any, folder: Path, packs: int, device: str) -> Iterator[Batch]:
    """The stream of the packed arms, as Unsloth's collator gives it."""
    for batch in streamed(folder, packs, device):
        inputs = collator.torch_call([batch.inputs | {"seq_lengths": batch.lengths}])
        # With a cache for generation it would attend across the sequences.
        yield replace(batch, inputs=inputs | {"use_cache": False})


def main() -> None:
    """The arm, on each folder."""
    options = parse()
    device = "cuda" if ON_GPU else "cpu"
    results = Results(bench="bench_training", path=options.output)
    label = f"unsloth {unsloth.__version__}" + (f", {options.packs} packs" if options.packs > 1 else "")
    for folder in options.packed:
        began, case = time.perf_counter(), case_of(options, folder)

        def add(metric: str, value: float, unit: str = "", case: str = case) -> None:
            results.add(case, label, metric, value, unit)

        model = load(options.model, folder, device, checkpointing="checkpointed" in case)
        kinds = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.requires_grad}
        print(f"  weights: {', '.join(sorted(kinds))}, {time.perf_counter() - began:.1f} s", flush=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=ON_GPU)
        trainer = Trainer(model=model, optimizer=optimizer)
        unsloths = wrapped(model, folder)
        stream = batches_of(unsloths.data_collator, folder, options.packs, device)

        def steps(trainer: Trainer = trainer, stream: Iterator[Batch] = stream) -> tuple[Timed, Timed]:
            first = time_steps(trainer, itertools.islice(stream, WARM_UP), WARM_UP, float("inf"))
            if ON_GPU:
                torch.cuda.reset_peak_memory_stats()
            print(f"  warm; torch's flash attention: {flash_impl.FLASH_IMPL_STATE}", flush=True)
            return first, time_steps(trainer, stream, options.steps, options.seconds)

        first, timed = unsloths.train(steps)
        print(f"  packed attention: {hf_packed_attention.HF_PACKED_ATTENTION_STATS}", flush=True)
        print(f"  {time.perf_counter() - began:.1f} s in all", flush=True)
        add_speed(add, model, timed)
        add("first loss of all", first.first_loss)
        if ON_GPU:
            add("peak memory", torch.cuda.max_memory_allocated() / GIB, "GiB")


if __name__ == "__main__":
    main()
