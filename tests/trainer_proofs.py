"""What the tests of single trainers' libraries share: packs, an export of them, and what their losses are.

A library gives batches in its own way; a test turns them into `Given`, and `assert_same_loss` holds them
against the packs: a tiny model's loss over all rows as they were given, against that of the packs' sequences
one by one. Under `scripts/test-trainers` what was shown becomes a row of scripts/results/trainers.jsonl.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from building import DEMO, built, pack
from conftest import ROOT
from torch import Tensor
from torch.nn.functional import cross_entropy
from unpacked import tiny_model

from padless.runtime.reader import PackedReader

TOLERANCE = 1e-5
TEETH = 1e-3
"""How far the loss has to be without boundaries, or a match says nothing."""
RECORDS = 40


@dataclass(frozen=True, kw_only=True)
class Given:
    """One row as a trainer would give it to its model, [T] each."""

    input_ids: Tensor
    next_labels: Tensor
    """What each token is asked to foretell: its label as the loss takes it, after whatever shift."""
    position_ids: Tensor
    attention_mask: Tensor | None = None
    """[1, 1, T, T] where the trainer makes one; otherwise the positions say where sequences begin."""


def packs_of_demo(folder: Path, *more: object) -> Path:
    """A packed folder of the demo's first records."""
    built(DEMO, folder / "packed", "--limit", RECORDS, *more)
    return folder / "packed"


def exported(packed: Path, to: str, *more: object) -> Path:
    """The packs in that form."""
    run = pack("export", packed, "--to", to, "--output", packed.parent / to, *more)
    assert run.code == 0, run.err
    return packed.parent / to


def sequences_of(packed: Path) -> list[tuple[list[int], list[int]]]:
    """Ids and unshifted labels of each sequence, in the order of the packs."""
    found = []
    for row in PackedReader(packed):
        at = 0
        for length in row.seq_lengths.tolist():
            one = slice(at, at + length)
            found.append((row.input_ids[one].tolist(), row.labels[one].tolist()))
            at += length
    return found


def places(lengths: Iterable[int]) -> Tensor:
    """[T] position_ids of sequences of these lengths."""
    return torch.cat([torch.arange(int(length)) for length in lengths])


def after(labels: Tensor) -> Tensor:
    """[T] unshifted labels -> the label of the token after each one, as transformers' losses shift them."""
    return torch.cat([labels[1:], labels.new_full((1,), -100)])


def assert_same_loss(package: str, how: str, packed: Path, rows: Iterable[Given]) -> None:
    """AssertionError where the rows' loss is not that of the packs' sequences; kept as a row otherwise."""
    sequences = sequences_of(packed)
    model = tiny_model(vocab=1 + max(max(ids) for ids, _ in sequences)).double().eval()
    alone, packs, mixed, targets, given = 0.0, 0.0, 0.0, 0, 0
    with torch.no_grad():
        for ids, labels in sequences:
            alone += _total(model, torch.tensor(ids), after(torch.tensor(labels)))
            targets += sum(label != -100 for label in labels)
        for row in rows:
            ids, wanted = row.input_ids.long(), row.next_labels.long()
            mask = None if row.attention_mask is None else row.attention_mask.to(torch.double)
            position_ids = row.position_ids.long()[None]
            packs += _total(model, ids, wanted, position_ids=position_ids, attention_mask=mask)
            mixed += _total(model, ids, wanted)
            given += int((wanted != -100).sum())
    assert given == targets, f"{given} tokens are trained, the packs have {targets}"
    apart, far = abs(packs - alone) / targets, abs(mixed - alone) / targets
    assert far > TEETH, "this model would not show it if sequences were mixed"
    assert apart <= TOLERANCE, f"the loss is {apart:.2g} from that of the single sequences"
    shown(package, how, sequences=len(sequences), apart=apart, mixed=far)


def _total(model: Any, ids: Tensor, next_labels: Tensor, **inputs: Any) -> float:
    logits = model(input_ids=ids[None], use_cache=False, **inputs).logits[0]
    return float(cross_entropy(logits, next_labels, ignore_index=-100, reduction="sum"))


def shown(
    package: str, how: str, *, sequences: int, apart: float | None = None, mixed: float | None = None
) -> None:
    """Keep what was shown where `scripts/test-trainers` asks for it."""
    if not (rows := os.environ.get("PADLESS_TRAINER_ROWS")):
        return
    sys.path.insert(0, str(ROOT / "scripts"))
    from bench_results import Results

    results = Results(bench="trainers", path=Path(rows))
    case, arm = f"{package} {version(package)}", f"{os.environ['PADLESS_TRAINER']}: {how}"
    results.add(case, arm, "sequences", sequences, "count")
    if apart is not None and mixed is not None:
        results.add(case, arm, "loss_apart", apart * 1e6, "1e-6 nats")
        results.add(case, arm, "loss_apart_mixed", mixed, "nats")
