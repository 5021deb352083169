"""What a rank of its own process does in the tests: in a module that a spawned process can import."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from padless.runtime.collate import collate
from padless.runtime.dataset import PackBatchSampler, PackedDataset
from padless.runtime.errors import FormatError, StepClockError
from padless.runtime.loss import step_targets
from padless.runtime.reader import PackedReader
from padless.runtime.step_clock import StepClock
from padless.runtime.stream import PackedStream
from padless.runtime.varlen_batch import VarlenBatch


def numbers(batch: VarlenBatch) -> list[int]:
    """The sequence ids of a batch; none for one without targets."""
    return [number for number in batch["sequence_ids"].tolist() if number >= 0]


def run_two(target: Callable[[int, int], tuple[Callable[..., None], tuple[Any, ...]]]) -> dict[int, Any]:
    """What two spawned ranks put; `target` gives for rank and port a function and its arguments."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = []
    for rank in (0, 1):
        function, arguments = target(rank, port)
        processes.append(context.Process(target=function, args=(*arguments, results), daemon=True))
        processes[-1].start()
    try:
        return dict(results.get(timeout=600) for _ in processes)
    finally:
        for process in processes:
            process.join(10)
            process.kill()


def read_through_cache(url: str, results: Any) -> None:
    """Read every pack of a folder; put their ids."""
    results.put([pack.input_ids.tolist() for pack in PackedReader(url)])


def train_every_way_rank(
    folders: list[Path], many: Path, out: Path, rank: int, port: int, results: Any
) -> None:
    """As one of two ranks open many shards, go through folders in a loop, and the last under trainers.

    Puts for each way what it gave, or the error that ended it. One process for all: to start one and to
    import its trainers takes longer than everything else.
    """
    names: dict[str, Any] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
    os.environ.update({name: str(value) for name, value in names.items()})
    torch.distributed.init_process_group("gloo")
    path = folders[-1]
    ways: dict[str, Callable[[], Any]] = {
        "one after another": lambda: _open_in_turn(many),
        "loop": lambda: [_loop(folder) for folder in folders],
        "accelerate": lambda: _under_accelerate(path),
        "trainer": lambda: _under_trainer(path, out / str(rank)),
        "lightning": lambda: _under_lightning(path, out / str(rank)),
    }
    found = {}
    for name, way in ways.items():
        try:
            found[name] = way()
        except Exception:  # the other ways are still tried
            found[name] = traceback.format_exc()
    results.put((rank, found))
    torch.distributed.destroy_process_group()


def _open_in_turn(path: Path) -> tuple[int, list[int] | FormatError]:
    """Open a folder and take a batch, the second rank before the first one has begun to."""
    found: tuple[int, list[int] | FormatError] | None = None
    for turn in (1, 0):
        if turn == torch.distributed.get_rank():
            stream = PackedStream(path, shuffle=False)
            try:
                found = len(stream), numbers(next(iter(stream)))
            except FormatError as error:
                found = len(stream), error
        torch.distributed.barrier()
    assert found is not None
    return found


def _loop(path: Path) -> list[tuple[list[list[int]], list[tuple[int, int]]]]:
    """Of epochs in step with the other rank, by seed and options: the batches, and their targets and all."""
    epochs = []
    for seed in range(3):
        for balance, remainder in ((None, "drop"), ("attention", "pad")):
            stream = PackedStream(path, packs_per_batch=2, seed=seed, balance=balance, remainder=remainder)
            batches, targets = [], []
            for batch in stream:
                # A rank with one batch less would leave the other one waiting here.
                targets.append((batch.num_targets, step_targets([batch])))
                batches.append(numbers(batch))
            epochs.append((batches, targets))
    return epochs


def _under_accelerate(path: Path) -> list[list[list[int]]]:
    """Two epochs of a prepared loader with our sampler."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    dataset = PackedDataset(path)
    sampler = PackBatchSampler(dataset, packs_per_batch=2, world_size=2, balance="attention")
    loader = accelerator.prepare(DataLoader(dataset, batch_sampler=sampler, collate_fn=collate))
    return [[numbers(batch) for batch in loader] for _ in range(2)]


class _Embedding(torch.nn.Module):
    """The smallest model that Trainer trains; it keeps what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Embedding(64, 1)
        self.seen: list[list[int]] = []

    def forward(
        self, input_ids: torch.Tensor, sequence_ids: torch.Tensor, **_: Any
    ) -> dict[str, torch.Tensor]:
        self.seen.append(sequence_ids.tolist())
        return {"loss": self.layer(input_ids % 64).mean()}


def _under_trainer(path: Path, out: Path) -> list[list[int]]:
    """An epoch under Trainer, which deals the packs of a PackedDataset to the ranks itself."""
    from transformers import Trainer, TrainingArguments

    model = _Embedding()
    arguments = TrainingArguments(
        output_dir=str(out),
        per_device_train_batch_size=2,
        num_train_epochs=1,
        dataloader_drop_last=True,
        use_cpu=True,
        ddp_backend="gloo",
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    Trainer(model=model, args=arguments, train_dataset=PackedDataset(path), data_collator=collate).train()
    return model.seen


def _under_lightning(path: Path, out: Path) -> list[list[list[int]]] | None:
    """Two epochs of a stream under Lightning's DDP; None where it is not installed."""
    try:
        import lightning
    except ImportError:
        return None

    class Tiny(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Embedding(64, 1)
            self.seen: list[list[list[int]]] = []

        def on_train_epoch_start(self) -> None:
            self.seen.append([])

        def training_step(self, batch: VarlenBatch) -> torch.Tensor:
            self.seen[-1].append(numbers(batch))
            return self.layer(batch["input_ids"] % 64).mean()

        def train_dataloader(self) -> DataLoader[VarlenBatch]:
            return DataLoader(PackedStream(path, packs_per_batch=2), batch_size=None)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    model = Tiny()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=out,
    )
    trainer.fit(model)
    return model.seen


def shard_rank(rank: int, port: int) -> None:
    """A packed step of a model sharded by FSDP2, prepared before and after, as one of two ranks."""
    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    from tiny_models import packed, tiny
    from torch.distributed.fsdp import fully_shard

    from padless.runtime.models import prepare_model

    batch = packed([5, 1, 9, 3], seed=rank).model_inputs()
    expected = prepare_model(tiny("qwen3"), check=True)(**batch).logits
    for prepared_first in (True, False):
        model = tiny("qwen3").train()
        if prepared_first:
            prepare_model(model)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        if not prepared_first:
            prepare_model(model)
        out = model(**batch)
        torch.testing.assert_close(out.logits, expected, atol=1e-5, rtol=1e-5)
        out.loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    # Everything held. Threads that torch leaves behind may abort a process that ends in Python's own way.
    os._exit(0)


def worked(seconds: list[float], **options: Any) -> StepClock:
    """A clock of a rank that worked so long each time."""
    time = 0.0
    clock = StepClock(now=lambda: time, **options)
    for each in seconds:
        time += 100  # between steps, which is not looked at
        with clock.working():
            time += each
    return clock


def clock_rank(rank: int, port: int, results: Any) -> None:
    """Measure as one of two ranks, and once as ranks that timed different numbers of steps."""
    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    clock = worked([[1, 4], [3, 2]][rank])
    shares = [clock.idle_share(), clock.idle_share(skip=1)]
    told = ""
    try:
        worked([1.0] * (2 + rank)).idle_share()
    except StepClockError as error:
        told = str(error)
    results.put((rank, (shares, told)))
    torch.distributed.destroy_process_group()
