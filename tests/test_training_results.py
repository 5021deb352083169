"""What is derived from measured training steps, and the pictures of it, from rows written here."""

from __future__ import annotations

import sys
from typing import Any
from xml.etree import ElementTree

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import training_plots
from training_tables import cases_of, derived, is_done, training_speed

CASE = "qwen3-8b, mix"
PADDED = {
    "tokens a second": 2_000.0, "tokens a second, without updates": 2_500.0, "useful": 0.25, "step": 400.0,
    "step, 10 %": 390.0, "step, 90 %": 410.0, "tokens a step": 800.0, "tokens an epoch": 1e6, "steps": 100.0,
    "activation memory, same sequences": 10.0, "tokens, same sequences": 4_000.0,
}  # fmt: skip
OWN = PADDED | {
    "tokens a second": 12_000.0, "tokens a second, without updates": 12_500.0, "useful": 1.0,
    "tokens a step": 16_000.0, "step": 16e6 / 12_000, "activation memory, same sequences": 2.0,
}  # fmt: skip
PEER = OWN | {"tokens a second": 8_000.0, "step": 2_000.0}


def rows(**arms: dict[str, float]) -> list[dict[str, Any]]:
    """Rows as bench_training.py writes them; `_` in an arm's name stands for what Python's names lack."""
    names = {
        "padded": "padded, 8 rows",
        "wide": "padded, 32 rows",
        "peer": "transformers, sdpa",
        "unsloth": "unsloth 1.0",
        "own": "padless",
    }
    about = {"hardware": "a GPU", "date": "2026-11-30"}
    versions = dict.fromkeys(("torch", "triton", "transformers", "liger-kernel", "flash-attn-4"), "1")
    return [
        {"case": CASE, "arm": names[arm], "metric": metric, "value": value, "versions": versions} | about
        for arm, found in arms.items()
        for metric, value in found.items()
    ]


def test_a_gain_stands_beside_what_padding_alone_explains() -> None:
    told = derived(cases_of(rows(own=OWN, peer=PEER, padded=PADDED))[0])
    assert told is not None
    assert "6.00 times" in told and ", 5.00 without the optimizer's time;" in told
    assert "25.0% alone explains 4.00, so 1.50 times (1.25) is the rest" in told
    assert "1.50 times `transformers, sdpa`" in told
    assert "the same 4,000 tokens take 80% less" in told


def test_speed_is_that_of_all_steps_or_of_the_median_of_a_few() -> None:
    slow = OWN | {"step": OWN["step"] / 2}  # half of the steps took three times as long
    for steps, gain in ((100, "6.00"), (6, "12.00")):
        told = derived(cases_of(rows(own=slow | {"steps": float(steps)}, padded=PADDED))[0])
        assert told is not None and f"trains {gain} times" in told


def test_what_all_padded_batches_of_an_epoch_take_is_told_where_it_is_known() -> None:
    epoch = {"tokens a second, epoch": 1_600.0, "useful, epoch": 0.2}
    told = derived(cases_of(rows(own=OWN, padded=PADDED | epoch))[0])
    assert told is not None and "epoch, 20.0% useful, 7.50 times (1.50 times what padding explains)" in told


def test_every_padding_free_peer_is_held_against_and_stands_before_our_own() -> None:
    measured = rows(
        own=OWN, unsloth=PEER | {"tokens a second": 9_600.0, "step": 16e6 / 9_600}, peer=PEER, padded=PADDED
    )
    told = derived(cases_of(measured)[0])
    assert told is not None and "1.50 times `transformers, sdpa`; 1.25 times `unsloth 1.0`" in told
    table = training_speed(measured)
    assert table.index("| padded") < table.index("| unsloth 1.0 |") < table.index("| padless |")


def test_the_last_of_equal_measurements_stands() -> None:
    table = training_speed(rows(padded=PADDED, own=OWN) + rows(own=OWN | {"tokens a second": 10_000.0}))
    assert "| padless | 10,000 | 5.00 x |" in table


def test_an_arm_without_room_is_told_and_not_derived_from() -> None:
    table = training_speed(rows(wide={"out of memory": 1}, own=OWN))
    assert "| padded, 32 rows | out of memory |" in table
    assert "is the rest" not in table


def test_an_arm_without_room_is_held_against_as_it_runs_with_checkpointing() -> None:
    full = {"out of memory": 1.0}
    checkpointed = [
        row | {"case": f"{CASE}, checkpointed"}
        for row in rows(padded=PADDED, peer=PEER, own=OWN | {"tokens a second": 9_000.0})
    ]
    measured = rows(padded=full, peer=full, own=OWN) + checkpointed
    told = derived(cases_of(measured)[0])
    assert told is not None
    assert "6.00 times the tokens a second of `padded, 8 rows` (checkpointed: without it has no room)" in told
    assert "1.50 times `transformers, sdpa` (checkpointed: without it has no room)" in told
    assert "activations" not in told  # those kept and those computed again are not compared
    assert "| qwen3-8b, mix | padless | 12,000 | 6.00 x |" in training_speed(measured)
    apart = derived(cases_of(measured)[1])
    assert apart is not None and "4.50 times the tokens a second of `padded, 8 rows`, " in apart


def test_slow_steps_of_a_peer_are_told_by_the_median_beside_the_mean() -> None:
    told = derived(cases_of(rows(own=OWN, peer=PEER | {"step": 1_600.0}))[0])
    assert told is not None and "1.50 times `transformers, sdpa`, 1.20 by their median steps" in told


def test_an_arm_is_measured_once() -> None:
    measured = rows(padded=PADDED, wide={"out of memory": 1}, peer=PEER)
    assert is_done(CASE, "padded, 8 rows", measured) and is_done(CASE, "padded, 32 rows", measured)
    assert is_done(CASE, "transformers", measured)
    assert not is_done(CASE, "transformers liger", measured) and not is_done(CASE, "padless", measured)
    assert not is_done("qwen3-0.6b, mix", "transformers", measured)
    assert not is_done(CASE, "padless", rows(own={"host": 3.0}))


@pytest.mark.parametrize("draw", ["throughput", "epoch", "losses"])
def test_pictures_are_whole_and_name_what_they_show(draw: str) -> None:
    cases = cases_of(rows(padded=PADDED, wide={"out of memory": 1}, own=OWN))
    curves = [
        {"case": "loss, fp32", "arm": arm, "metric": "loss", "value": 2.0, "values": [9.5, 4.0, 2.0]}
        for arm in ("one by one", "packed")
    ]
    drawn = {
        "throughput": lambda: training_plots.throughput(cases),
        "epoch": lambda: training_plots.epoch(cases[0]),
        "losses": lambda: training_plots.losses(curves),
    }[draw]()
    words = " ".join(ElementTree.fromstring(drawn).itertext())
    expected = {
        "throughput": ("12,000 (6.0 x)", "out of memory"),
        "epoch": ("padded, 8 rows", "seconds"),
        "losses": ("packed: 2.0000", "one by one: 2.0000"),
    }[draw]
    for name in expected:
        assert name in words
