"""Log-probabilities of packed tokens are those of the sequences alone, without a softmax of all in memory."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from unpacked import (  # noqa: E402
    VOCAB,
    alone,
    assert_same_training,
    batch_of,
    logits_of,
    random_sequences,
    tiny_model,
)

from padless.runtime import logps as logps_module  # noqa: E402
from padless.runtime.errors import CollateError  # noqa: E402
from padless.runtime.logps import (  # noqa: E402
    sequence_ends,
    sequence_logps,
    sequence_sums,
    sequence_targets,
    token_logps,
)
from padless.runtime.static import pad_batch  # noqa: E402

LENGTHS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.integers(1, 4), st.sampled_from([1.0, 0.7]))
def test_token_logps_are_those_of_log_softmax_inside_each_sequence(
    shapes: list[tuple[int, int]], rows_at_a_time: int, temperature: float
) -> None:
    sequences = random_sequences([n for n, _ in shapes], [min(p, n) for n, p in shapes])
    batch = batch_of(sequences)
    logits = torch.randn(1, batch["input_ids"].shape[1], VOCAB, dtype=torch.float64, requires_grad=True)
    expected, start = torch.zeros(logits.shape[1], dtype=torch.float64), 0
    for ids, prompt in sequences:
        for place in range(max(prompt, 1), len(ids)):
            scores = logits[0, start + place - 1] / temperature
            expected[start + place] = scores.log_softmax(-1)[ids[place]]
        start += len(ids)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logps_module, "CHUNK_VALUES", rows_at_a_time * VOCAB)
        found = token_logps(logits, batch, temperature=temperature)
        torch.testing.assert_close(found[0], expected)
        if expected.requires_grad:
            weights = torch.randn(logits.shape[1], dtype=torch.float64)
            grad = torch.autograd.grad((found[0] * weights).sum(), logits)
            torch.testing.assert_close(grad, torch.autograd.grad((expected * weights).sum(), logits))


@settings(max_examples=40, deadline=None)
@given(LENGTHS)
def test_sums_and_counts_are_those_of_each_sequence(shapes: list[tuple[int, int]]) -> None:
    batch = batch_of(random_sequences([n for n, _ in shapes], [min(p, n) for n, p in shapes]))
    values = torch.randn(batch["input_ids"].shape, requires_grad=True)
    parts = values[0].split([n for n, _ in shapes])
    torch.testing.assert_close(sequence_sums(values, batch), torch.stack([part.sum() for part in parts]))
    counts = [max(n - max(min(p, n), 1), 0) for n, p in shapes]
    assert sequence_targets(batch).tolist() == counts


def test_sums_of_long_answers_are_right_to_the_last_digit() -> None:
    """Margins are small differences of such sums: added up in single precision this one is 0.02 off."""
    batch = batch_of(random_sequences([4000, 3], [0, 0]))
    values = -8 * torch.rand(1, 4003, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([part.double().sum() for part in values[0].split([4000, 3])])
    found = sequence_sums(values, batch)
    assert found.dtype == torch.float32 and found.tolist() == expected.float().tolist()


def test_packed_logps_and_their_gradients_are_those_of_the_sequences_alone() -> None:
    model = tiny_model()
    sequences = random_sequences([7, 3, 1, 9, 5], [3, 1, 0, 4, 5])  # the last one is all prompt
    batch = batch_of(sequences)
    factors = torch.tensor([1.0, -2.0, 3.0, 0.5, 1.0])

    def each() -> torch.Tensor:
        return torch.stack([alone(model, ids, prompt).sum() for ids, prompt in sequences])

    def packed() -> torch.Tensor:
        return sequence_logps(logits_of(model, batch), batch)

    assert_same_training(model, lambda: (packed() * factors).sum(), lambda: (each() * factors).sum())
    means = sequence_logps(logits_of(model, batch), batch, mean=True)
    torch.testing.assert_close(means * sequence_targets(batch), each(), atol=1e-5, rtol=1e-5)


def test_half_precision_logits_are_summed_in_single_precision() -> None:
    batch = batch_of(random_sequences([900], [1]))
    logits = (torch.randn(1, 900, VOCAB) * 3).bfloat16().requires_grad_()
    found = sequence_logps(logits, batch)
    labels = batch["input_ids"][0, 1:, None]
    expected = logits[0, :-1].double().log_softmax(-1).gather(-1, labels).sum()
    assert found.dtype == torch.float32
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    found.sum().backward()
    assert logits.grad is not None and logits.grad.dtype == torch.bfloat16


def test_no_more_than_a_chunk_of_logits_is_made_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of(random_sequences([500], [1]))
    logits = torch.randn(500, 1000).bfloat16().requires_grad_()
    monkeypatch.setattr(logps_module, "CHUNK_VALUES", 10_000)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            found = func(*args, **(kwargs or {}))
            for one in found if isinstance(found, tuple) else (found,):
                if isinstance(one, torch.Tensor) and one.dtype == torch.float32:
                    largest = max(largest, one.numel())
            return found

    with Watch():
        sequence_logps(logits, batch).sum().backward()
    assert 1_000 < largest <= 10_000


def test_sequences_of_filled_up_batches_have_no_logps() -> None:
    batch = pad_batch(batch_of(random_sequences([4, 3], [1, 1])), tokens=10, sequences=5)
    found = sequence_logps(torch.randn(1, 10, VOCAB), batch)
    assert found.shape == (5,) and found[2:].tolist() == [0, 0, 0] and (found[:2] < 0).all()


def test_the_last_token_is_found_by_the_boundaries() -> None:
    """BR-181: pad and eos are 4, and 4 also closes earlier turns."""
    batch = batch_of([([9, 4, 8, 4, 7, 4], 1), ([5, 4, 4, 4], 1)])
    assert sequence_ends(batch).tolist() == [5, 9]


def test_the_length_of_an_answer_comes_from_its_mask() -> None:
    """BR-177: prompt 3, chosen 5, rejected 3."""
    batch = batch_of(random_sequences([8, 6], [3, 3]))
    assert sequence_targets(batch).tolist() == [5, 3]


def test_logits_of_other_tokens_are_refused() -> None:
    batch = batch_of(random_sequences([4, 3], [1, 1]))
    with pytest.raises(CollateError, match="of 6 tokens and the batch has 7"):
        token_logps(torch.randn(1, 6, VOCAB), batch)
    with pytest.raises(CollateError, match="temperature must be above 0, is 0"):
        token_logps(torch.randn(1, 7, VOCAB), batch, temperature=0)
