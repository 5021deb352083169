"""How long data-parallel ranks wait for one another, measured: packs in random order and in balanced steps.

    torchrun --nproc-per-node 2 scripts/bench_ranks.py PACKED [--model qwen3-0.6b] [--wraps ddp fsdp2]

PACKED is a folder of long and short documents, a pack a rank and step (scripts/vary_texts.py makes texts for
one). First each rank computes forward and backward alone, without a word to the others, and only then meets
them, where gradients would be summed. "idle" is the share of all ranks' time that the slowest pack of each
step costs the others, "waited" the time for which they do stand at the meeting: no formula, but a clock.
"predicted" is what PackedStream's costs say of the same steps, "predicted, epoch" of all. `same packs` gives
every rank the same ones: what machines themselves differ by, below which no order can come.

Then whole steps, optimizer and all, under DistributedDataParallel and under FSDP2, whose collectives run
beside the computing: their length, the tokens of all ranks a second, and "not computing", the share of them
in which a rank did not do its own work: waiting, communication and updates. Weights are random, on GPUs in
bf16; layers are computed again in the backward pass. CPUs go by the wall's clock: give each rank a core.
"""

from __future__ import annotations

import argparse
import itertools
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from bench_results import Results
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from training_models import MODELS, make_model

from padless.runtime.models import prepare_model
from padless.runtime.order import attention_costs
from padless.runtime.step_clock import StepClock, waiting
from padless.runtime.stream import PackedStream
from padless.runtime.varlen_batch import VarlenBatch

WARM_UP = 3
ORDERS: dict[str, dict[str, Any]] = {
    "random": {},
    "balanced": {"balance": "attention"},
    "same packs": {"rank": 0, "world_size": 1},
}
"""Options of PackedStream."""
Batches = Sequence[VarlenBatch]


def ddp(model: Any) -> Any:
    """Gradients are summed in buckets, beside the backward pass."""
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def fsdp2(model: Any) -> Any:
    """Weights are gathered layer by layer, both ways."""
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


WRAPS: dict[str, Callable[[Any], Any]] = {"ddp": ddp, "fsdp2": fsdp2}


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among all, and where its rows go."""

    device: torch.device
    results: Results
    case: str

    def add(self, arm: str, metric: str, value: float, unit: str = "share") -> None:
        """A row, once for all ranks."""
        if dist.get_rank() == 0:
            self.results.add(self.case, arm, metric, value, unit)

    def gathered(self, mine: Sequence[float] | torch.Tensor) -> torch.Tensor:
        """[ranks, ...] float64: what each rank has, in their order."""
        own = torch.as_tensor(mine, dtype=torch.float64).to(self.device)
        found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(found, own)
        return torch.stack(found).cpu()

    def meet(self) -> None:
        """Wait for all ranks; on a GPU its stream does."""
        dist.all_reduce(torch.zeros(1, device=self.device))


def forward_backward(model: Any, batch: VarlenBatch) -> None:
    """One rank's part of a step."""
    model(**batch.model_inputs()).loss.backward()


def compute_alone(model: Any, batches: Batches, ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor]:
    """[ranks, steps] seconds of computing, and of standing where all meet."""
    work, wait = StepClock(device=ranks.device), StepClock(device=ranks.device)
    ranks.meet()
    for batch in batches:
        model.zero_grad(set_to_none=True)
        with work.working():
            forward_backward(model, batch)
        with wait.working():
            ranks.meet()
    model.zero_grad(set_to_none=True)
    return ranks.gathered(work.step_seconds()[WARM_UP:]), ranks.gathered(wait.step_seconds()[WARM_UP:])


def train(model: Any, batches: Batches, ranks: Ranks) -> torch.Tensor:
    """[ranks, steps] seconds of whole steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=ranks.device.type == "cuda")
    clock = StepClock(device=ranks.device)
    ranks.meet()
    for batch in batches:
        with clock.working():
            forward_backward(model, batch)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return ranks.gathered(clock.step_seconds()[WARM_UP:])


def predicted(batches: Batches, ranks: Ranks) -> float:
    """The idle share of these very steps by what the runtime balances by."""
    costs = []
    for batch in batches[WARM_UP:]:
        lengths = np.diff(batch["cu_seq_lens_q"].cpu().numpy().astype(np.int64))
        costs.append(float(attention_costs(lengths.sum(), (lengths**2).sum())))
    return waiting(ranks.gathered(costs))


def take(
    folder: Path, order: str, steps: int, device: torch.device
) -> tuple[PackedStream, list[VarlenBatch]]:
    """This rank's batches of the warm-up and so many steps, on the device."""
    stream = PackedStream(folder, **ORDERS[order])
    epochs = itertools.chain.from_iterable(itertools.repeat(stream))
    return stream, [batch.to(device) for batch in itertools.islice(epochs, WARM_UP + steps)]


def measure(options: argparse.Namespace, ranks: Ranks) -> None:
    """All orders alone, then under each wrapper."""
    _, batches = take(options.packed, "random", options.steps, ranks.device)
    model = prepare_model(make_model(options.model, ranks.device.type, checkpointing=True), liger=False)
    # Kernels are compiled and memory is taken; then every rank knows how many steps there is time for.
    work, _ = compute_alone(model, batches[: 2 * WARM_UP], ranks)
    steps = max(WARM_UP, min(options.steps, int(options.seconds / float(work.max(dim=0).values.mean()))))
    alone: dict[str, torch.Tensor] = {}
    taken: dict[str, list[VarlenBatch]] = {}
    for order in ORDERS:
        stream, taken[order] = take(options.packed, order, steps, ranks.device)
        work, waits = compute_alone(model, taken[order], ranks)
        alone[order] = work
        ranks.add(order, "idle", waiting(work))
        for rank, (own, stood) in enumerate(zip(work.sum(dim=1), waits.sum(dim=1), strict=True)):
            ranks.add(order, f"waited, rank {rank}", float(stood / (own + stood)))
        ranks.add(order, "waited", float((waits.sum(dim=1) / (work + waits).sum(dim=1)).mean()))
        ranks.add(order, "predicted", predicted(taken[order], ranks))
        if order != "same packs":
            ranks.add(order, "predicted, epoch", stream.predicted_idle())
        ranks.add(order, "steps", steps, "")
        ranks.add(order, "computing", float(work.mean()) * 1e3, "ms")
    for wrap in options.wraps:
        try:
            wrapped = WRAPS[wrap](model)
            for order in ("random", "balanced"):
                seconds = train(wrapped, taken[order], ranks)
                tokens = ranks.gathered([batch["input_ids"].shape[1] for batch in taken[order][WARM_UP:]])
                arm = f"{wrap}, {order}"
                ranks.add(arm, "step", float(seconds.mean()) * 1e3, "ms")
                ranks.add(arm, "tokens a second", float(tokens.sum() / seconds.mean(dim=0).sum()), "/s")
                ranks.add(arm, "not computing", 1 - float(alone[order].sum() / seconds.sum()))
            del wrapped
        except Exception:
            # A wrapper that fails does so on all ranks, or the others run into the group's timeout.
            print(f"{wrap} failed on rank {dist.get_rank()}: {traceback.format_exc()}", flush=True)


def main() -> None:
    """Runs as one rank, started by torchrun."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packed", type=Path)
    parser.add_argument("--model", choices=MODELS, default="qwen3-0.6b")
    parser.add_argument("--wraps", nargs="*", choices=WRAPS, default=list(WRAPS))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=10, help="for the steps of an arm, about, at most")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results/bench_ranks.jsonl")
    options = parser.parse_args()
    on_gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo", timeout=timedelta(seconds=120))
    case = f"{options.model}, {options.packed.name}, {dist.get_world_size()} ranks"
    measure(
        options, Ranks(device=device, results=Results(bench="bench_ranks", path=options.output), case=case)
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
