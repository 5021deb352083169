"""The loss of distillation over packs equals that of the sequences alone, with gradients, to 1e-5."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import numpy as np  # noqa: E402
from torch.nn.functional import kl_div  # noqa: E402
from unpacked import VOCAB, assert_same_training, batch_of, logits_of, random_sequences, tiny_model  # noqa: E402

from padless.runtime.errors import CollateError  # noqa: E402
from padless.runtime.in_memory import pack_sequences  # noqa: E402
from padless.runtime.losses import distillation_losses  # noqa: E402

SEQUENCES = random_sequences([8, 6, 5, 3, 9], [3, 1, 0, 2, 4])
K = 4


def teach(ids: list[int], teacher: Any, k: int) -> tuple[Any, Any]:
    """The teacher's candidates for each token: [L, k] each; the first token's are 0."""
    with torch.no_grad():
        logps = teacher(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    best = logps[:-1].topk(k)
    return (torch.nn.functional.pad(part, (0, 0, 1, 0)) for part in (best.indices, best.values))


def taught(k: int = K) -> Any:
    """The sequences as one batch, with candidates and weights."""
    teacher = tiny_model(seed=5)
    rows = []
    for number, (ids, prompt) in enumerate(SEQUENCES):
        candidates, logps = teach(ids, teacher, k)
        labels = [token if place >= max(prompt, 1) else -100 for place, token in enumerate(ids)]
        rows.append(
            {
                "input_ids": np.array(ids),
                "labels": np.array(labels),
                "teacher_ids": candidates.numpy().astype(np.int32),
                "teacher_logprobs": logps.numpy(),
                "loss_weight": np.full(len(ids), 0.5 + number / 4, dtype=np.float32),
            }
        )
    [batch] = pack_sequences(rows, max_tokens=64)
    return batch, rows


def alone(model: Any, row: dict[str, Any], *, rest: bool, temperature: float) -> Any:
    """The weighed sum of one sequence's losses by torch's own divergence, a token at a time."""
    scores = model(input_ids=torch.from_numpy(row["input_ids"])[None]).logits[0]
    total = scores.sum() * 0
    for place, label in enumerate(row["labels"].tolist()):
        if label == -100:
            continue
        candidates = torch.tensor(row["teacher_ids"][place]).long()
        theirs = torch.tensor(row["teacher_logprobs"][place])
        if rest:
            probabilities = scores[place - 1].softmax(-1)[candidates]
            ours = torch.cat([probabilities, 1 - probabilities.sum(-1, keepdim=True)]).log()
            theirs = torch.cat([theirs.exp(), 1 - theirs.exp().sum(-1, keepdim=True)]).log()
        else:
            ours = (scores[place - 1][candidates] / temperature).log_softmax(-1)
            theirs = (theirs / temperature).log_softmax(-1)
        apart = kl_div(ours, theirs, log_target=True, reduction="sum") * temperature**2
        total = total + float(row["loss_weight"][place]) * apart
    return total


@pytest.mark.parametrize(("rest", "temperature"), [(True, 1.0), (False, 1.0), (False, 2.5)])
def test_packed_equals_unpacked(rest: bool, temperature: float) -> None:
    model = tiny_model()
    batch, rows = taught()

    def packed() -> Any:
        losses = distillation_losses(logits_of(model, batch), batch, temperature=temperature, rest=rest)
        assert losses.shape == batch["labels"].shape and not losses[batch["labels"] == -100].any()
        return (losses * batch["loss_weight"]).sum() / batch.num_targets

    def unpacked() -> Any:
        total = sum(alone(model, row, rest=rest, temperature=temperature) for row in rows)
        return total / batch.num_targets

    assert_same_training(model, packed, unpacked)


def test_with_all_candidates_it_is_the_divergence_of_whole_distributions() -> None:
    """And nothing where the model is its own teacher."""
    model, (batch, _) = tiny_model(), taught(VOCAB)
    teacher = tiny_model(seed=5)
    logits, theirs = logits_of(model, batch), logits_of(teacher, batch)
    losses = distillation_losses(logits, batch, rest=False)
    one = kl_div(logits.log_softmax(-1), theirs.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    trained = batch["labels"][0, 1:] != -100
    torch.testing.assert_close(losses[0, 1:][trained], one[0, :-1][trained], atol=1e-5, rtol=1e-5)
    assert float(distillation_losses(theirs.detach(), batch, rest=False).abs().max()) < 1e-5


def test_a_batch_without_a_teacher_and_a_temperature_without_meaning_are_refused() -> None:
    model, (batch, _) = tiny_model(), taught()
    logits = logits_of(model, batch)
    plain = batch_of(SEQUENCES)
    with pytest.raises(CollateError, match="no teacher_ids and no teacher_logprobs"):
        distillation_losses(logits, plain)
    with pytest.raises(CollateError, match=r"temperature is 2\.0"):
        distillation_losses(logits, batch, temperature=2.0)
    with pytest.raises(CollateError, match="must be above 0"):
        distillation_losses(logits, batch, temperature=0.0, rest=False)
