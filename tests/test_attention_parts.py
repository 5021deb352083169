"""Rows cut in two: the same attention and gradients, and cut only where it was worth the copies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from attending import attend_slowly, bounds_of, pretend  # noqa: E402

from padless.runtime import attention  # noqa: E402
from padless.runtime.attention import (  # noqa: E402
    BACKENDS,
    Choice,
    Options,
    Request,
    boundaries_of,
    choose_parts,
    varlen_attention,
)
from padless.runtime.attention.parts import attend_in_parts, cut  # noqa: E402

PLAIN = Options(True, 8**-0.5, None, None, None, False)


@pytest.mark.parametrize("lengths", [[9, 5, 3, 1, 2], [1, 3, 2, 9], [9, 5, 3, 1, 0, 0]], ids=str)
@pytest.mark.parametrize("features", [{}, {"window": 3}], ids=str)
def test_parts_are_the_whole(lengths: list[int], features: dict[str, Any]) -> None:
    tokens = sum(lengths)
    fused = torch.randn(tokens, 10, 8, dtype=torch.float64, requires_grad=True)
    q, k, v = fused.split([6, 2, 2], 1)
    boundaries = boundaries_of(bounds_of(lengths), 9, tokens)
    two = cut(boundaries, 4)
    assert two is not None
    forwards = (BACKENDS["sdpa"].forward, BACKENDS["sdpa_mask"].forward)
    parts = list(zip(two, forwards, strict=True))
    out = attend_in_parts(parts, q, k, v, boundaries, PLAIN._replace(**features))
    want = attend_slowly(q, k, v, lengths, **features)
    grad = torch.randn_like(want)
    assert torch.allclose(out, want)
    got, right = (torch.autograd.grad(x, fused, grad, retain_graph=True)[0] for x in (out, want))
    assert torch.allclose(got, right)


def test_a_part_is_a_row_of_its_own() -> None:
    boundaries = boundaries_of(bounds_of([9, 5, 3, 1, 2, 0]), 9, 20)
    two = cut(boundaries, 4)
    assert two is not None
    assert [part.cu_seqlens.tolist() for part in two] == [[0, 9, 14], [0, 3, 4, 6]]
    assert [(part.tokens, part.max_seqlen, part.sequences) for part in two] == [(14, 9, 2), (6, 3, 3)]
    assert all(part.cu_seqlens.dtype == torch.int32 for part in two)


@pytest.mark.parametrize("lengths", [[9, 1, 9], [1, 9, 1], [1, 2], [9, 9], [9]], ids=str)
def test_a_row_without_two_ends_stays_whole(lengths: list[int]) -> None:
    assert cut(boundaries_of(bounds_of(lengths), 9, sum(lengths)), 4) is None


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    return partial(pretend, monkeypatch)


def taken(lengths: list[int], **changed: Any) -> list[tuple[int, str]]:
    """Tokens and backend of each part on a GPU."""
    boundaries = boundaries_of(bounds_of(lengths), max(lengths), sum(lengths))
    request = Request(
        torch.device("cuda"), torch.bfloat16, 128, 32, 8, sum(lengths), len(lengths), max(lengths),
        boundaries.mean_length(), causal=True, window=False, softcap=False, sinks=False,
        deterministic=False, backward=True,
    )._replace(**changed)  # fmt: skip
    return [(part.tokens, name) for part, name in choose_parts(request, boundaries)]


def test_long_sequences_go_to_a_library_and_short_ones_of_the_row_to_our_kernels(
    device: Callable[..., None],
) -> None:
    device((9, 0), "flash-attn-4")
    assert taken([4_096] * 3 + [100] * 100) == [(12_288, "flash_attn_4"), (10_000, "short")]
    assert taken([100] * 100 + [4_096] * 3) == [(10_000, "short"), (12_288, "flash_attn_4")]


@pytest.mark.parametrize(
    ("lengths", "whole"),
    [
        ([4_096] * 6 + [100] * 100, "flash_attn_4"),  # 29 % in short ones
        ([4_096] * 3 + [100] * 60, "flash_attn_4"),  # too few for a launch of their own
        ([800] * 3 + [100] * 100, "short"),  # not worth the copies
        ([4_096, *[100] * 100, 4_096, 4_096], "flash_attn_4"),  # not at one end
        ([4_096] * 4, "flash_attn_4"),
    ],
)
def test_other_rows_stay_whole(lengths: list[int], whole: str, device: Callable[..., None]) -> None:
    device((9, 0), "flash-attn-4")
    assert taken(lengths) == [(sum(lengths), whole)]


def test_where_our_kernels_are_never_passed_or_never_taken_rows_stay_whole(
    device: Callable[..., None],
) -> None:
    lengths = [4_096] * 3 + [100] * 100
    device((9, 0))
    assert taken(lengths) == [(22_288, "short")]
    device((10, 0), "flash-attn-4")
    assert taken(lengths) == [(22_288, "flash_attn_4")]
    device((9, 0), "flash-attn-4")
    assert taken(lengths, sinks=True) == [(22_288, "flash_attn_4")]
    assert taken(lengths, mean_length=None) == [(22_288, "flash_attn_4")]


def test_auto_attends_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With another table, on the CPU: sdpa_mask stands for our kernels."""
    first = Choice("short", mean_length=4)
    monkeypatch.setattr(attention.choice, "SHORT", first)
    monkeypatch.setattr(attention.choice, "AUTO", (first, Choice("sdpa")))
    monkeypatch.setitem(BACKENDS, "short", BACKENDS["sdpa_mask"])
    lengths = [9, 5, 3, 1, 2, 4, 3, 3]
    q, k, v = (torch.randn(30, h, 8, dtype=torch.float64) for h in (6, 2, 2))
    called = []

    def noted(*given: Any) -> Any:
        called.append(len(given[0]))
        return attend_in_parts(*given)

    monkeypatch.setattr(attention, "attend_in_parts", noted)
    out = varlen_attention(q, k, v, bounds_of(lengths), 9)
    assert torch.allclose(out, attend_slowly(q, k, v, lengths)) and called == [2]
