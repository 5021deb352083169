"""The block mask made from boundaries is the one that looking at every pair of tokens gives."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from attending import bounds_of  # noqa: E402
from hypothesis import example, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn.attention.flex_attention import BlockMask  # noqa: E402

from padless.runtime.attention import Boundaries, Options, flex  # noqa: E402
from padless.runtime.attention.flex import BLOCK, block_mask  # noqa: E402
from padless.runtime.attention.sdpa_mask import block_mask as pairs  # noqa: E402


def listed(counts: Tensor, columns: Tensor) -> list[set[int]]:
    """The blocks of keys of each block of queries, each once."""
    rows = [row[:count].tolist() for count, row in zip(counts[0, 0], columns[0, 0], strict=True)]
    assert all(len(set(row)) == len(row) for row in rows)
    return [set(row) for row in rows]


def blocks_of(seen: Tensor) -> Tensor:
    """[T, T] -> the pairs of each pair of blocks, [blocks, blocks, BLOCK, BLOCK]; unseen behind the row."""
    blocks = -(-len(seen) // BLOCK)
    filled = torch.zeros(blocks * BLOCK, blocks * BLOCK, dtype=torch.bool)
    filled[: len(seen), : len(seen)] = seen
    return filled.view(blocks, BLOCK, blocks, BLOCK).transpose(1, 2)


def check_keys(mask: BlockMask, partial: list[set[int]], full: list[set[int]], blocks: Tensor) -> None:
    """The blocks of queries of each block of keys: the same pairs, and in full only where all see all."""
    assert mask.q_num_blocks is not None and mask.q_indices is not None
    assert mask.full_q_num_blocks is not None and mask.full_q_indices is not None
    some = listed(mask.q_num_blocks, mask.q_indices)
    every = listed(mask.full_q_num_blocks, mask.full_q_indices)
    for key, (few, all_of) in enumerate(zip(some, every, strict=True)):
        assert not few & all_of
        seen_by = {
            query for query, row in enumerate(zip(partial, full, strict=True)) if key in row[0] | row[1]
        }
        assert few | all_of == seen_by
        assert all_of == {query for query in seen_by if blocks[query, key].all()}


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([1, 2, 60, 127, 128, 129, 256, 500]), min_size=1, max_size=6),
    empty=st.integers(0, 2),
    causal=st.booleans(),
    window=st.none() | st.sampled_from([1, 2, 100, 128, 129, 300]),
)
@example(lengths=[128, 128], empty=0, causal=True, window=None)
@example(lengths=[500], empty=1, causal=True, window=200)
def test_the_block_mask_sees_what_pairs_of_tokens_see(
    lengths: list[int], empty: int, causal: bool, window: int | None
) -> None:
    window = window if causal else None
    boundaries = Boundaries(bounds_of([*lengths, *[0] * empty]), max(lengths), sum(lengths))
    mask = block_mask(boundaries, causal, window)
    seen = pairs(boundaries, Options(causal, 1.0, window, None, None, False))
    blocks = blocks_of(seen)

    assert mask.seq_lengths == (sum(lengths), sum(lengths))
    assert mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None
    partial, full = (
        listed(*x)
        for x in (
            (mask.kv_num_blocks, mask.kv_indices),
            (mask.full_kv_num_blocks, mask.full_kv_indices),
        )
    )
    check_keys(mask, partial, full, blocks)
    for row, (some, every) in enumerate(zip(partial, full, strict=True)):
        assert not some & every
        assert some | every == set(blocks[row].any(-1).any(-1).nonzero()[:, 0].tolist())
        assert every == set(blocks[row].all(-1).all(-1).nonzero()[:, 0].tolist())

    at = torch.arange(sum(lengths))
    assert torch.equal(mask.mask_mod(None, None, at[:, None], at[None, :]), seen)


def test_kinds_of_calls_are_compiled_apart_and_none_falls_back_to_plain_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch.compile gives up on a function after a few programs, with a warning, and runs it as it is."""
    compiled: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(flex, "flex_attention", lambda q, k, v, **_: q * 2)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=count, dynamic=False))
    with torch._dynamo.config.patch(recompile_limit=2):
        for heads in (1, 2):
            attend = flex.compiled_for(("kind", heads))
            for tokens in (5, 6, 5):
                q = torch.ones(1, heads, tokens, 8)
                assert torch.equal(attend(q, q, q, block_mask=None), q * 2)
        assert len(compiled) == 4
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            attend(q[:, :, :4], q, q, block_mask=None)
