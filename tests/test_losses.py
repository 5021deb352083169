"""Losses over packed batches equal those of the sequences alone, gradients too; DPO equals TRL's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from building import built, write_lines  # noqa: E402
from torch.nn.functional import logsigmoid  # noqa: E402
from toys import word_tokenizer  # noqa: E402
from unpacked import (  # noqa: E402
    alone,
    assert_same_training,
    batch_of,
    logits_of,
    random_sequences,
    tiny_model,
)

from padless.runtime.collate import collate  # noqa: E402
from padless.runtime.errors import CollateError  # noqa: E402
from padless.runtime.logps import sequence_ends, sequence_logps, token_logps  # noqa: E402
from padless.runtime.loss import sequence_weights, step_targets  # noqa: E402
from padless.runtime.losses import (  # noqa: E402
    dpo_losses,
    grpo_losses,
    kto_losses,
    orpo_losses,
    pairs_of,
    reward_losses,
    simpo_losses,
)
from padless.runtime.reader import PackedReader  # noqa: E402

ANSWERS = random_sequences([8, 6, 5, 3, 9, 4], [3, 3, 0, 2, 4, 2])
"""Sequence 3 belongs to no pair; the pairs' halves lie in any order."""
PAIR_ID, IS_CHOSEN = [7, 7, 2, -1, 2, 9], [1, 0, 0, -1, 1, 1]
LAST = random_sequences([7], [4])
"""The rejected half of pair 9."""
PAIRS = [(4, 2), (0, 1), (5, 6)]
"""(chosen, rejected) by pair_id."""


@pytest.fixture
def pairs() -> Any:
    columns = {
        "pair_id": [*PAIR_ID, 9],
        "is_chosen": [*IS_CHOSEN, 0],
        "margin": [0.5, 0.5, 0, 0, 0, 1.5, 1.5],
    }
    return batch_of(ANSWERS + LAST, sequence=columns)


@pytest.fixture
def model() -> Any:
    return tiny_model()


def single(model: Any, number: int, *, mean: bool = False) -> torch.Tensor:
    logps = alone(model, *(ANSWERS + LAST)[number])
    return logps.mean() if mean else logps.sum()


def packed(model: Any, batch: Any, *, mean: bool = False) -> torch.Tensor:
    return sequence_logps(logits_of(model, batch), batch, mean=mean)


def test_pairs_are_found_wherever_their_halves_lie(pairs: Any) -> None:
    found = pairs_of(pairs)
    assert list(zip(found.chosen.tolist(), found.rejected.tolist(), strict=True)) == PAIRS


@pytest.mark.parametrize(
    ("pair_id", "is_chosen", "torn"),
    [([1, 1, 2], [1, 0, 1], 2), ([1, 1], [1, 1], 1), ([1, 1, 1, 1], [1, 0, 1, 0], 1), ([3, 4], [1, 0], 3)],
)
def test_a_torn_pair_is_refused(pair_id: list[int], is_chosen: list[int], torn: int) -> None:
    sequences = random_sequences([3] * len(pair_id), [1] * len(pair_id))
    batch = batch_of(sequences, sequence={"pair_id": pair_id, "is_chosen": is_chosen})
    with pytest.raises(CollateError, match=f"pair_id {torn} has not just one chosen and one rejected"):
        pairs_of(batch)


def test_a_batch_without_pairs_is_refused() -> None:
    with pytest.raises(CollateError, match="no pair_id and no is_chosen: .* --format preference"):
        pairs_of(batch_of(ANSWERS))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_dpo_over_packed_pairs_is_that_of_the_answers_alone(model: Any, pairs: Any, smoothing: float) -> None:
    reference = tiny_model(seed=1).requires_grad_(False)

    def together() -> torch.Tensor:
        logps, fixed = packed(model, pairs), packed(reference, pairs)
        return dpo_losses(logps, fixed, pairs_of(pairs), label_smoothing=smoothing).mean()

    def apart() -> torch.Tensor:
        losses = []
        for chosen, rejected in PAIRS:
            better = single(model, chosen) - single(reference, chosen)
            worse = single(model, rejected) - single(reference, rejected)
            margin = 0.1 * (better - worse)
            losses.append(-(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin))
        return torch.stack(losses).mean()

    assert_same_training(model, together, apart)


def test_simpo_over_packed_pairs_is_that_of_the_answers_alone(model: Any, pairs: Any) -> None:
    def apart() -> torch.Tensor:
        margins = [single(model, c, mean=True) - single(model, r, mean=True) for c, r in PAIRS]
        return torch.stack([-logsigmoid(2.5 * margin - 0.8) for margin in margins]).mean()

    def together() -> torch.Tensor:
        return simpo_losses(packed(model, pairs, mean=True), pairs_of(pairs), beta=2.5, gamma=0.8).mean()

    assert_same_training(model, together, apart)


def test_orpo_over_packed_pairs_is_that_of_the_answers_alone(model: Any, pairs: Any) -> None:
    def odds(logp: torch.Tensor) -> torch.Tensor:
        return torch.log(logp.exp() / (1 - logp.exp()))

    def apart() -> torch.Tensor:
        losses = []
        for chosen, rejected in PAIRS:
            better, worse = single(model, chosen, mean=True), single(model, rejected, mean=True)
            losses.append(-better - 0.3 * logsigmoid(odds(better) - odds(worse)))
        return torch.stack(losses).mean()

    def together() -> torch.Tensor:
        return orpo_losses(packed(model, pairs, mean=True), pairs_of(pairs), weight=0.3).mean()

    assert_same_training(model, together, apart)


def test_orpo_is_finite_where_an_answer_is_certain(pairs: Any) -> None:
    logps = torch.zeros(7, requires_grad=True)
    orpo_losses(logps, pairs_of(pairs)).sum().backward()
    assert logps.grad is not None and logps.grad.isfinite().all()


def test_kto_over_packed_answers_is_that_of_the_answers_alone(model: Any) -> None:
    labels = [1, 0, 0, -1, 1, 1]
    batch = batch_of(ANSWERS, sequence={"label": labels})
    reference = tiny_model(seed=1).requires_grad_(False)
    kl = torch.tensor(0.4)

    def together() -> torch.Tensor:
        logps, fixed = packed(model, batch), packed(reference, batch)
        return kto_losses(logps, fixed, batch["label"], kl=kl, desirable_weight=1.5).sum() / 5

    def apart() -> torch.Tensor:
        losses = []
        for number, label in enumerate(labels):
            ratio = single(model, number) - single(reference, number)
            if label == 1:
                losses.append(1.5 * (1 - torch.sigmoid(0.1 * (ratio - 0.4))))
            elif label == 0:
                losses.append(1 - torch.sigmoid(0.1 * (0.4 - ratio)))
        return torch.stack(losses).mean()

    assert_same_training(model, together, apart)
    below = kto_losses(torch.zeros(6), torch.zeros(6), batch["label"], kl=-3.0)
    assert below.tolist() == [0.5, 0.5, 0.5, 0, 0.5, 0.5]


@pytest.mark.parametrize("with_margin", [True, False])
def test_a_reward_model_over_packed_pairs_is_that_of_the_answers_alone(
    model: Any, pairs: Any, with_margin: bool
) -> None:
    head = torch.nn.Linear(32, 1, bias=False)
    model.score = head  # its parameters are compared, too

    def hidden(inputs: dict[str, Any]) -> torch.Tensor:
        found: torch.Tensor = model.model(**inputs).last_hidden_state[0]
        return found

    def apart() -> torch.Tensor:
        losses = []
        for chosen, rejected in PAIRS:
            better, worse = (
                head(hidden({"input_ids": torch.tensor([(ANSWERS + LAST)[n][0]])})[-1])[0]
                for n in (chosen, rejected)
            )
            margin = float(pairs["margin"][chosen]) if with_margin else 0
            losses.append(-logsigmoid(better - worse - margin) + 0.01 * (better + worse) ** 2)
        return torch.stack(losses).mean() + 0 * sum(p.sum() for p in model.lm_head.parameters())

    def together() -> torch.Tensor:
        inputs = {key: value for key, value in pairs.model_inputs().items() if key != "labels"}
        rewards = head(hidden(inputs)[sequence_ends(pairs)])[:, 0]
        margin = pairs["margin"] if with_margin else None
        losses = reward_losses(rewards, pairs_of(pairs), margin=margin, center=0.01)
        return losses.mean() + 0 * sum(p.sum() for p in model.lm_head.parameters())

    assert_same_training(model, together, apart)


@pytest.mark.parametrize("mean", ["tokens", "sequences"])
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_grpo_over_packed_rollouts_is_that_of_the_rollouts_alone(model: Any, mean: str, beta: float) -> None:
    reference = tiny_model(seed=1).requires_grad_(False)
    made = torch.Generator().manual_seed(0)
    advantages = torch.randn(6, generator=made).tolist()
    per_token = [[value] * len(ids) for (ids, _), value in zip(ANSWERS, advantages, strict=True)]
    before = [alone(model, *one).detach() for one in ANSWERS]
    before = [logps + 0.4 * torch.randn(len(logps), generator=made) for logps in before]
    filled = [
        [0.0] * (len(ids) - len(logps)) + logps.tolist()
        for (ids, _), logps in zip(ANSWERS, before, strict=True)
    ]
    batch = batch_of(ANSWERS, token={"advantages": per_token, "old_logprobs": filled})

    def together() -> torch.Tensor:
        logps = token_logps(logits_of(model, batch), batch)
        fixed = token_logps(logits_of(reference, batch), batch)
        losses = grpo_losses(logps, batch, beta=beta, reference_logps=fixed, clip_high=0.28)
        if mean == "tokens":
            return losses.sum() / step_targets([batch])
        return (losses * sequence_weights(batch)).sum() / len(ANSWERS)

    def apart() -> torch.Tensor:
        each = []
        for one, old, advantage in zip(ANSWERS, before, advantages, strict=True):
            logps, fixed = alone(model, *one), alone(reference, *one)
            ratio = torch.exp(logps - old)
            clipped = torch.clamp(ratio, 0.8, 1.28)
            losses = -torch.min(ratio * advantage, clipped * advantage)
            each.append(losses + beta * (torch.exp(fixed - logps) - (fixed - logps) - 1))
        if mean == "tokens":
            return torch.cat(each).mean()
        return torch.stack([losses.mean() for losses in each]).mean()

    assert_same_training(model, together, apart)


def test_grpo_takes_one_advantage_for_a_whole_response(model: Any) -> None:
    each = [1.5, -0.5, 0.0, 2.0, -1.0, 0.25]
    spread = [[value] * len(ids) for value, (ids, _) in zip(each, ANSWERS, strict=True)]
    by_token = batch_of(ANSWERS, token={"advantages": spread})
    by_sequence = batch_of(ANSWERS, sequence={"advantages": each})
    logps = token_logps(logits_of(model, by_token), by_token)
    assert torch.equal(grpo_losses(logps, by_sequence), grpo_losses(logps, by_token))


def test_grpo_takes_the_policy_for_the_sampling_one_where_nothing_is_known_of_it(model: Any) -> None:
    batch = batch_of(ANSWERS, token={"advantages": [[2.0] * len(ids) for ids, _ in ANSWERS]})
    logps = token_logps(logits_of(model, batch), batch)
    losses = grpo_losses(logps, batch)
    assert losses[batch["labels"] != -100].unique().tolist() == [-2.0]
    assert losses[batch["labels"] == -100].unique().tolist() == [0.0]
    with pytest.raises(CollateError, match="beta is 0.1 and there are no reference_logps"):
        grpo_losses(logps, batch, beta=0.1)
    with pytest.raises(CollateError, match="the batch has no advantages"):
        grpo_losses(logps, batch_of(ANSWERS))


def test_dpo_over_a_packed_folder_is_trls_unpacked_dpo_loss(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    transformers = pytest.importorskip("transformers")
    rows = [
        {
            "prompt": " ".join(f"w{10 + (n + k) % 90}" for k in range(2 + n % 3)) + " ",
            "chosen": " ".join(f"w{20 + (5 * n + k) % 70}" for k in range(1 + n % 5)),
            "rejected": " ".join(f"w{30 + (3 * n + k) % 60}" for k in range(1 + (n + 2) % 4)),
        }
        for n in range(8)
    ]
    words = word_tokenizer(tmp_path / "words", template=None)
    source = write_lines(tmp_path / "rows.jsonl", rows)
    built(source, tmp_path / "packed", "--tokenizer", words, "--max-length", 24)
    model, reference = tiny_model(vocab=100), tiny_model(seed=1, vocab=100).requires_grad_(False)
    trainer = trl.DPOTrainer(
        model=model,
        ref_model=reference,
        args=trl.DPOConfig(
            output_dir=str(tmp_path / "out"),
            per_device_train_batch_size=len(rows),
            beta=0.1,
            use_cpu=True,
            bf16=False,
            report_to="none",
            disable_tqdm=True,
            gradient_checkpointing=False,
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(words),
    )
    (theirs,) = trainer.get_train_dataloader()

    def packs() -> torch.Tensor:
        losses = []
        for one in PackedReader(tmp_path / "packed"):
            batch = collate([one])
            logps, fixed = packed(model, batch), packed(reference, batch)
            losses.append(dpo_losses(logps, fixed, pairs_of(batch), beta=0.1))
        assert len(losses) > 1
        return torch.cat(losses).sum() / len(rows)

    assert_same_training(model, packs, lambda: trainer.compute_loss(model, theirs))
