"""Sequences packed in memory: each once, with its columns, in micro-batches of like work on every rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import example, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from padless.runtime.balance import plan_micro_batches  # noqa: E402
from padless.runtime.errors import CollateError  # noqa: E402
from padless.runtime.in_memory import pack_sequences  # noqa: E402
from padless.runtime.losses import kto_losses  # noqa: E402

ROLLOUTS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, 6), st.booleans()).filter(lambda one: one[0] + one[1] > 1),
    min_size=1,
    max_size=12,
)


def rollout(number: int, prompt: int, response: int, masked: bool = False) -> dict[str, Any]:
    """Token t of rollout n is 100 n + t, its log-probability -token."""
    ids = 100 * number + np.arange(prompt + response)
    return {
        "prompt_ids": ids[:prompt],
        "response_ids": ids[prompt:],
        "response_mask": np.arange(response) % 2 == 0 if masked else np.ones(response, dtype=bool),
        "old_logprobs": -ids[prompt:].astype(np.float32),
        "topk": np.stack([ids[prompt:]] * 3, axis=1).astype(np.float32),
        "reward": float(number),
        "group_id": number // 2,
        "name": f"r{number}",
    }


@settings(max_examples=60, deadline=None)
@given(ROLLOUTS, st.integers(10, 25), st.integers(1, 5))
def test_every_sequence_is_in_one_batch_with_all_that_belongs_to_it(
    shapes: list[tuple[int, int, bool]], max_tokens: int, world_size: int
) -> None:
    rollouts = [rollout(number, *shape) for number, shape in enumerate(shapes)]
    ranks = [
        pack_sequences(rollouts, max_tokens=max_tokens, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    seen = []
    for batch in (batch for batches in ranks for batch in batches):
        assert batch["input_ids"].shape[1] <= max_tokens
        bounds = batch["cu_seq_lens_q"].tolist()
        for place, number in enumerate(batch["sequence_ids"].tolist()):
            mine = slice(bounds[place], bounds[place + 1])
            if number < 0:
                assert (batch["labels"][0, mine] == -100).all() and batch["reward"][place] == 0
                assert batch["group_id"][place] == -1
                continue
            seen.append(number)
            one, (prompt, response, _) = rollouts[number], shapes[number]
            ids = [*one["prompt_ids"], *one["response_ids"]]
            trained = [False] * prompt + one["response_mask"].tolist()
            trained[0] = False
            assert batch["input_ids"][0, mine].tolist() == ids
            wanted = [token if yes else -100 for token, yes in zip(ids, trained, strict=True)]
            assert batch["labels"][0, mine].tolist() == wanted
            assert batch["old_logprobs"][0, mine].tolist() == [0.0] * prompt + [-t for t in ids[prompt:]]
            assert batch["topk"][0, mine, 2].tolist() == [0.0] * prompt + ids[prompt:]
            assert batch["position_ids"][0, mine].tolist() == [*range(prompt + response)]
            assert (batch["reward"][place], batch["group_id"][place]) == (number, number // 2)
            assert batch["name"][place] == f"r{number}"
        assert batch.num_targets == int((batch["labels"] != -100).sum())
    assert sorted(seen) == [*range(len(rollouts))]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 4), st.integers(50, 90))
def test_plans_hold_each_sequence_once_within_the_limit(
    lengths: list[int], world_size: int, max_tokens: int
) -> None:
    plan = plan_micro_batches(np.array(lengths), max_tokens=max_tokens, world_size=world_size)
    assert sorted(number for numbers in plan for number in numbers) == [*range(len(lengths))]
    assert all(sum(lengths[number] for number in numbers) <= max_tokens for numbers in plan)
    assert len(plan) % world_size == 0
    # Of micro-batches that are all needed, any two together hold more than one can.
    assert len(plan) < 2 * sum(lengths) / max_tokens + 2 * world_size


def test_ranks_have_like_work_in_all_and_in_each_step() -> None:
    lengths = np.random.default_rng(0).lognormal(6, 0.8, size=2000).astype(np.int64) + 1
    lengths = np.minimum(lengths, 8192)
    plan = plan_micro_batches(lengths, max_tokens=16384, world_size=8)
    work = np.array([(24576 * lengths[n] + lengths[n] ** 2).sum() for n in plan]).reshape(-1, 8)
    assert work.sum(axis=0).max() / work.sum(axis=0).mean() < 1.002
    assert (work.max(axis=1) / work.mean(axis=1)).max() < 1.01
    assert len(plan) <= 8 * -(-int(lengths.sum()) // (8 * 16384)) + 8


def test_whole_sequences_with_labels_or_a_mask() -> None:
    ids = np.array([5, 6, 7])
    (batch,) = pack_sequences(
        [{"input_ids": ids, "labels": np.array([5, -100, 7])}], max_tokens=8, rank=0, world_size=1
    )
    assert batch["labels"].tolist() == [[-100, -100, 7]]
    (batch,) = pack_sequences([{"input_ids": [5, 6, 7]}], max_tokens=8, rank=0, world_size=1)
    assert batch["labels"].tolist() == [[-100, 6, 7]] and batch.num_targets == 2
    (batch,) = pack_sequences(
        [{"input_ids": torch.tensor([5, 6, 7]), "response_mask": torch.tensor([0, 0, 1])}],
        max_tokens=8,
        rank=0,
        world_size=1,
    )
    assert batch["labels"].tolist() == [[-100, -100, 7]]


def test_log_probabilities_are_one_for_each_token() -> None:
    """BR-182: rows of 3 and 4 tokens with 2 and 3 log-probabilities; then with 3 and 4."""
    rows = [{"input_ids": np.arange(n), "old_logprobs": np.arange(n - 1.0)} for n in (3, 4)]
    with pytest.raises(CollateError, match=r"old_logprobs of sequence [01] has [23] entries for [34] input"):
        pack_sequences(rows, max_tokens=8, rank=0, world_size=1)
    rows = [{"input_ids": np.arange(n), "old_logprobs": 10.0 * n + np.arange(n)} for n in (3, 4)]
    (batch,) = pack_sequences(rows, max_tokens=8, rank=0, world_size=1)
    assert batch["old_logprobs"].tolist() == [[40, 41, 42, 43, 30, 31, 32]]


def test_advantages_that_are_longer_than_the_response_are_refused() -> None:
    """BR-183: the advantage of response token j stands at its own target."""
    long = {"prompt_ids": np.arange(3), "response_ids": np.arange(3, 7), "advantages": np.arange(7.0)}
    with pytest.raises(CollateError, match="advantages of sequence 0 has 7 entries for 4 response_ids"):
        pack_sequences([long, long], max_tokens=16, rank=0, world_size=1)
    (batch,) = pack_sequences([{**long, "advantages": np.arange(1.0, 5)}], max_tokens=8, rank=0, world_size=1)
    assert batch["advantages"].tolist() == [[0, 0, 0, 1, 2, 3, 4]]
    assert batch["labels"].tolist() == [[-100, -100, -100, 3, 4, 5, 6]]


def test_an_eos_that_is_also_padding_stays() -> None:
    """BR-184: a true length of 2, so the ids are [20, 2], whatever 2 stands for elsewhere."""
    one = {"prompt_ids": np.array([9]), "response_ids": np.array([20, 2])}
    (batch,) = pack_sequences([one], max_tokens=8, rank=0, world_size=1)
    assert batch["input_ids"].tolist() == [[9, 20, 2]] and batch["labels"].tolist() == [[-100, 20, 2]]


def test_values_of_a_sequence_stay_with_it() -> None:
    """BR-185: weights 1.0 and 0.5, names a and b, in the order of the rows in the batch."""
    rows = [
        {"input_ids": np.arange(4), "weight": 1.0, "name": "a"},
        {"input_ids": np.arange(3), "weight": 0.5, "name": "b"},
    ]
    (batch,) = pack_sequences(rows, max_tokens=8, rank=0, world_size=1)
    assert batch["weight"].tolist() == [1.0, 0.5] and batch["name"] == ["a", "b"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no sequences to pack"),
        ([{"input_ids": np.arange(9)}], "sequence 0 has 9 tokens and max_tokens is 8"),
        ([{"input_ids": np.arange(2)}, {"input_ids": np.arange(0)}], "sequence 1 is empty"),
        ([{"input_ids": [1, 2], "reward": 1.0}, {"input_ids": [1, 2]}], "has no reward"),
        ([{"text": "no ids"}], "has no prompt_ids"),
        (
            [{"input_ids": [1]}, {"input_ids": [1], "reward": 1}],
            "sequence 1 has reward, and sequence 0 has none",
        ),
        ([{"input_ids": [1.0, 2.0]}], r"input_ids of sequence 0 is float32 \[2\]"),
        ([{"input_ids": np.ones((1, 3), np.int64)}, {"input_ids": [1]}], r"sequence 0 is int64 \[1, 3\]"),
        ([{"input_ids": [1, 2], "reward": 1.0}, {"input_ids": [1], "reward": None}], "NoneType and float"),
        ([{"input_ids": [1, 2], "reward": 1.0}, {"input_ids": [1], "reward": [2.0]}], "float and list"),
        (
            [{"input_ids": [1, 2], "adv": [1.0, 2]}, {"input_ids": [1], "adv": 2.0}],
            "sequence 1 has a number for",
        ),
        ([{"input_ids": [1, 2], "k": [[1], [2]]}, {"input_ids": [1], "k": [3]}], "k is not alike in all"),
        ([{"input_ids": [1, 2], "k": ["a", "b"]}], "columns by token are numbers"),
        (
            [{"input_ids": [1, 2], "image_grid_thw": [[1, 2, 2]]}],
            "sequence 0 has image_grid_thw: give image_tok",
        ),
        ([{"input_ids": [1, 2], "video_grid_thw": [[1, 2, 2]]}], "videos are not packed"),
        ([{"input_ids": [1, 2], "videos": ["0.mp4"]}], "sequence 0 has videos: videos are not packed"),
        ([{"input_ids": [1], "images": []}, {"input_ids": [1], "images": ["a"]}], "sequence 1 has images"),
        ([{"input_ids": [1, 2], "response_mask": [0, 0.5]}], r"response_mask of sequence 0 has 0\.5; it"),
        ([{"input_ids": [1, 2], "response_mask": [0, float("nan")]}], "response_mask of sequence 0 has nan"),
        ([{"input_ids": [1, 2]}, {"input_ids": [3, -1]}], "sequence 1 has the id -1"),
        ([{"input_ids": np.array([2**63 + 5, 1], dtype=np.uint64)}], "sequence 0 has the id -"),
        ([{"input_ids": [1, 2, 3], "labels": [2, 3, -100]}], "have 2 where its ids have 1: labels are uns"),
        ([{"input_ids": [1, 2], "labels": [-100, 2.5]}], r"have 2\.5 where its ids have 2"),
        ([{"input_ids": [1, 2], "labels": [1, 2], "response_mask": [0, 1]}], "labels and response_mask"),
        ([{"prompt_ids": [1, 2], "response_ids": [3], "labels": [3]}], "labels and response_ids"),
        ([{"input_ids": [1, 2], "prompt_ids": [1], "response_ids": [2]}], "input_ids and prompt_ids"),
        ([{"input_ids": [1, 2], "sequence_ids": 5}], "sequence_ids, which is made here"),
        ([{"input_ids": [1, 2], "position_ids": [0, 1]}], "position_ids, which is made here"),
        ([{"input_ids": [1, 2], "attention_mask": [1, 0]}], "attention_mask of sequence 0 is not 1 for all"),
        ([{"input_ids": [1, 2], "k": torch.ones(2, dtype=torch.bfloat16)}], "k of sequence 0 cannot be read"),
        ([{"input_ids": [1, 2], "k": [[1], [1, 2]]}], "k of sequence 0 cannot be read: "),
        ([{"input_ids": [1, 2], "reward": torch.ones((), dtype=torch.bfloat16)}], "reward is Tensor"),
        ([{"input_ids": [1, 2], "group_id": 2**63}], "group_id is 9223372036854775808 in a sequence"),
        ({"input_ids": [[1, 2]]}, "one dict; give a list with a dict for each sequence"),
        (5, "the sequences are int; give a list"),
        ([[1, 2], [3]], "sequence 0 is list; give a dict with input_ids, or"),
        ([{"input_ids": [1, 2]}, "text"], "sequence 1 is str; give a dict"),
        ([{"input_ids": [1, 2]}, None], "sequence 1 is NoneType; give a dict"),
        ([{"input_ids": [1, 2]}, {"input_ids": 3}], "input_ids of sequence 1 is int; give its token ids"),
        (
            [{"input_ids": torch.tensor([1, 2])}, {"input_ids": None}],
            "sequence 1 is NoneType; give its",
        ),
        ([{"input_ids": [1]}, {"input_ids": [True, False]}], r"sequence 1 is bool \[2\]; ids are whole"),
        ([{"input_ids": torch.ones(1, 3).long()}], r"sequence 0 is int64 \[1, 3\]; ids are whole"),
    ],
)
def test_what_cannot_be_packed_is_refused(rows: Any, message: str) -> None:
    with pytest.raises(CollateError, match=message):
        pack_sequences(rows, max_tokens=8, rank=0, world_size=1)


def test_a_limit_that_is_no_number_is_refused() -> None:
    with pytest.raises(CollateError, match="max_tokens is None; it is a whole number"):
        pack_sequences([{"input_ids": [1, 2]}], max_tokens=None, rank=0, world_size=1)  # type: ignore[arg-type]


def test_names_are_those_of_the_first_sequence_on_every_rank() -> None:
    """Rank 1 has none but the last sequence, which says more than the first."""
    rows = [{"input_ids": [1, 2]}, {"input_ids": [1], "reward": 2.0}]
    with pytest.raises(CollateError, match="sequence 1 has reward, and sequence 0 has none"):
        pack_sequences(rows, max_tokens=2, rank=1, world_size=2)


@settings(max_examples=60, deadline=None)
@given(ROLLOUTS, st.sampled_from([torch.from_numpy, np.ndarray.tolist, lambda array: tuple(array.tolist())]))
def test_tensors_lists_tuples_and_generators_give_the_batches_of_arrays(
    shapes: list[tuple[int, int, bool]], form: Any
) -> None:
    rows = [rollout(number, *shape) for number, shape in enumerate(shapes)]
    others = (
        {name: form(value) if isinstance(value, np.ndarray) else value for name, value in row.items()}
        for row in rows
    )
    given = dict(max_tokens=12, rank=0, world_size=2)
    for batch, wanted in zip(pack_sequences(others, **given), pack_sequences(rows, **given), strict=True):
        assert batch.keys() == wanted.keys()
        for name, value in wanted.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(batch[name], value) and batch[name].dtype == value.dtype, name
            else:
                assert batch[name] == value, name


NUMBERS = st.one_of(st.booleans(), st.integers(-(2**70), 2**70), st.floats(width=32), st.just(np.int32(3)))


@settings(max_examples=150, deadline=None)
@example([[-(2**63) - 1], [0.0]])
@example([[1], [0.5]])
@given(st.lists(st.lists(NUMBERS, max_size=3), min_size=1, max_size=3))
def test_lists_of_numbers_are_what_numpy_takes_them_for(lists: list[list[Any]]) -> None:
    """Whatever the quick way does not tell apart as numpy does, it leaves to numpy."""
    arrays = [np.array(one) for one in lists]
    rows = [{"prompt_ids": [1, 2], "response_ids": [3] * len(one), "value": one} for one in lists]
    rows = [row | {"response_mask": [0] * len(row["value"])} for row in rows]  # NaN is for others to refuse
    kind = np.result_type(*[array.dtype for array in arrays if array.size] or [np.float64])
    if kind.hasobject:
        with pytest.raises(CollateError, match="value of a sequence holds object"):
            pack_sequences(rows, max_tokens=64, rank=0, world_size=1)
        return
    (batch,) = pack_sequences(rows, max_tokens=64, rank=0, world_size=1)
    kind = np.dtype(np.float32) if kind == np.float64 else kind
    found = {number: batch["value"][0, start + 2 : end] for number, start, end in _bounds(batch)}
    assert batch["value"].numpy().dtype == kind
    for number, array in enumerate(arrays):
        np.testing.assert_array_equal(found[number].numpy(), array.astype(kind))


def _bounds(batch: Any) -> list[tuple[int, int, int]]:
    ends = batch["cu_seq_lens_q"].tolist()
    return list(zip(batch["sequence_ids"].tolist(), ends, ends[1:], strict=False))


def test_lists_and_empty_prompts_and_responses_are_taken() -> None:
    """An empty list is one of floats to numpy; Python's floats are float32, as in torch and in folders."""
    rows = [
        {"prompt_ids": [], "response_ids": [5, 6], "advantages": [0.5, 0.25], "reward": 1.5},
        {"prompt_ids": [7, 8], "response_ids": [], "advantages": [], "reward": 2.5},
        {"prompt_ids": [9], "response_ids": [4], "advantages": [1.0], "reward": 0.5},
    ]
    (batch,) = pack_sequences(rows, max_tokens=8, rank=0, world_size=1)
    assert batch["sequence_ids"].tolist() == [0, 1, 2]
    assert batch["labels"].tolist() == [[-100, 6, -100, -100, -100, 4]] and batch.num_targets == 2
    assert batch["advantages"].tolist() == [[0.5, 0.25, 0, 0, 0, 1]]
    assert batch["advantages"].dtype == batch["reward"].dtype == torch.float32


def test_nan_is_refused_where_it_would_be_trained() -> None:
    values = np.array([np.nan, 1.0], dtype=np.float32)
    rows = [{"input_ids": [5, 6], "advantages": np.ones(2, dtype=np.float32)}]
    with pytest.raises(CollateError, match="advantages of sequence 1 has NaN at a trained token"):
        bad = {"input_ids": [5, 6], "advantages": values[::-1]}
        pack_sequences([*rows, bad], max_tokens=8, rank=0, world_size=1)
    # The first token of a sequence is never trained.
    (batch,) = pack_sequences(
        [*rows, {"input_ids": [5, 6], "advantages": values}], max_tokens=8, rank=0, world_size=1
    )
    assert batch["advantages"].isnan().tolist() == [[False, False, True, False]]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ([1.0, np.inf], "inf"),
        (np.array([0, -np.inf], np.float16), "-inf"),
        (np.array([[0, 0], [-np.inf, np.inf]], np.float32), "inf"),
        (np.inf, "inf"),
        (-np.inf, "-inf"),
    ],
)
def test_infinities_are_refused_where_they_would_be_trained(values: Any, told: str) -> None:
    rows = [{"input_ids": [5, 6], "advantages": values}]
    with pytest.raises(CollateError, match=f"advantages of sequence 0 has {told} at a trained token"):
        pack_sequences(rows, max_tokens=8, rank=0, world_size=1)


def test_a_teachers_other_words_may_be_impossible() -> None:
    best = np.array([[0.0, -np.inf], [-0.5, -np.inf]], np.float32)
    rows = [{"input_ids": [5, 6], "teacher": best}]
    (batch,) = pack_sequences(rows, max_tokens=8, rank=0, world_size=1)
    assert batch["teacher"].isneginf().tolist() == [[[False, True], [False, True]]]


def test_nan_for_a_whole_sequence_is_refused_unless_nothing_of_it_is_trained() -> None:
    rows = [{"input_ids": [5, 6], "advantages": 1.0}, {"input_ids": [5], "advantages": float("nan")}]
    (batch,) = pack_sequences(rows, max_tokens=8, rank=0, world_size=1)
    assert batch["advantages"].isnan().tolist() == [False, True]
    rows[1]["input_ids"] = [5, 6, 7]
    with pytest.raises(CollateError, match="advantages of sequence 1 has NaN at a trained token"):
        pack_sequences(rows, max_tokens=8, rank=0, world_size=1)


def test_an_attention_mask_of_ones_says_nothing_and_is_in_no_batch() -> None:
    rows = [{"input_ids": [5, 6], "attention_mask": [1, 1]}, {"input_ids": [7], "attention_mask": [1]}]
    (batch,) = pack_sequences(rows, max_tokens=8, rank=0, world_size=1)
    assert "attention_mask" not in batch


@pytest.mark.parametrize("label", [True, np.True_, np.uint8(1), 1, 1.0])
def test_a_rank_without_a_sequence_has_no_answer_to_judge(label: Any) -> None:
    """-1 is no label, and neither true and false nor whole numbers without a sign have it."""
    row = {"prompt_ids": [4], "response_ids": [5, 6], "label": label}
    ((judged,), (filler,)) = [pack_sequences([row], max_tokens=8, rank=n, world_size=2) for n in (0, 1)]
    assert judged["label"].tolist() == [1] and filler["label"].tolist() == [-1]
    assert judged["label"].dtype == filler["label"].dtype
    logps = torch.zeros(1)
    assert float(kto_losses(logps, logps, filler["label"], kl=0.0)) == 0
    assert float(kto_losses(logps, logps, judged["label"], kl=0.0)) == 0.5


def test_batches_of_a_rank_are_changed_apart() -> None:
    """They are views of one share, and none of another's tokens."""
    rows = [rollout(number, 3, 5) for number in range(6)]
    batches = pack_sequences(rows, max_tokens=8, rank=0, world_size=1)
    assert len(batches) == 6
    for batch in batches:
        for name in ("input_ids", "labels", "position_ids", "old_logprobs", "reward", "topk"):
            batch[name].fill_(-7)
    for batch in pack_sequences(rows, max_tokens=8, rank=0, world_size=1):
        assert batch["cu_seq_lens_q"].tolist() == [0, 8] and batch["seq_idx"].unique().tolist() == [0]
        assert int(batch["input_ids"][0, 0]) == 100 * int(batch["sequence_ids"])
