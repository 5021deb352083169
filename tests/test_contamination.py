"""The ways in which sequences of a pack silently see each other in transformers, and that none is open here.

Each test first shows that the trap is one, with the installed transformers, and then that what our paths
hand to a model does not step into it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers.modeling_flash_attention_utils import _is_packed_sequence  # noqa: E402
from unpacked import random_sequences, tiny_model  # noqa: E402

from padless.runtime.collate import collate  # noqa: E402
from padless.runtime.in_memory import pack_sequences  # noqa: E402
from padless.runtime.static import pad_batch  # noqa: E402
from padless.runtime.trainers.hf import PadlessCollator  # noqa: E402

LENGTHS = (5, 9, 3, 7)
SEQUENCES = random_sequences(LENGTHS, (1, 2, 1, 3))


def rows() -> list[dict[str, Any]]:
    """Two packs of two sequences."""
    made = []
    for number in (0, 2):
        pair = SEQUENCES[number : number + 2]
        made.append(
            {
                "input_ids": [token for ids, _ in pair for token in ids],
                "labels": [t if n >= prompt else -100 for ids, prompt in pair for n, t in enumerate(ids)],
                "seq_lengths": [len(ids) for ids, _ in pair],
                "sequence_ids": [number, number + 1],
            }
        )
    return made


def in_memory() -> dict[str, Any]:
    rollouts = [{"prompt_ids": ids[:prompt], "response_ids": ids[prompt:]} for ids, prompt in SEQUENCES]
    (batch,) = pack_sequences(rollouts, max_tokens=64)
    return batch.model_inputs()


PATHS: dict[str, Callable[[], dict[str, Any]]] = {
    "collate": lambda: collate(rows()).model_inputs(),
    "PadlessCollator": lambda: PadlessCollator()(rows()),
    "pad_batch": lambda: pad_batch(collate(rows()), tokens=32, sequences=8).model_inputs(),
    "pack_sequences": in_memory,
}
"""Every way from packs to what a model's forward takes."""


def far_from_alone(model: Any, batch: dict[str, Any]) -> float:
    """How far the logits of the sequences are from those that each has alone, at most."""
    with torch.no_grad():
        logits, at, far = model(**batch).logits[0], 0, 0.0
        order = [SEQUENCES[n][0] for n in range(len(SEQUENCES))]
        known = {tuple(ids) for ids in order}
        while known:
            length = next(n for n in LENGTHS if tuple(batch["input_ids"][0, at : at + n].tolist()) in known)
            ids = batch["input_ids"][:, at : at + length]
            known.remove(tuple(ids[0].tolist()))
            far = max(far, float((model(input_ids=ids).logits[0] - logits[at : at + length]).abs().max()))
            at += length
    return far


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_mask_of_ones_mixes_sequences_and_is_never_made(path: str, attention: str) -> None:
    model = tiny_model(attention=attention).eval()
    batch = PATHS[path]()
    assert "attention_mask" not in batch
    assert far_from_alone(model, batch) < 1e-5
    ones = torch.ones_like(batch["input_ids"])
    assert far_from_alone(model, batch | {"attention_mask": ones}) > 1e-2


@pytest.mark.parametrize("path", PATHS)
def test_flash_attention_takes_several_rows_for_one_sequence_each_and_gets_one(path: str) -> None:
    batch = PATHS[path]()
    positions = batch["position_ids"]
    assert positions.shape[0] == 1 and _is_packed_sequence(positions, batch_size=1)
    half = positions.shape[1] // 2
    assert not _is_packed_sequence(positions[:, : 2 * half].view(2, half), batch_size=2)


def test_a_padded_token_turns_boundaries_off_and_filling_is_a_sequence_instead() -> None:
    """Under FlashAttention a mask with a zero in it takes the way without boundaries."""
    plain, filled = collate(rows()), pad_batch(collate(rows()), tokens=32, sequences=8)
    inputs = filled.model_inputs()
    assert "attention_mask" not in inputs and inputs["input_ids"].shape == (1, 32)
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        assert int(inputs[name][-1]) == 32
        assert inputs[name][: len(LENGTHS) + 1].tolist() == plain[name].tolist()
    used = sum(LENGTHS)
    assert inputs["position_ids"][0, used:].tolist() == list(range(32 - used))
    assert set(filled["labels"][0, used:].tolist()) == {-100}
