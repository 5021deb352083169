"""Varlen attention on the CPU: every backend at hand against a slow reference, and what is refused."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from attending import attend_slowly, bounds_of  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import Tensor  # noqa: E402

from padless.runtime import attention  # noqa: E402
from padless.runtime.attention import (  # noqa: E402
    AUTO,
    BACKENDS,
    Choice,
    boundaries_of,
    choose,
    varlen_attention,
)
from padless.runtime.attention.boundaries import copied_from  # noqa: E402
from padless.runtime.errors import AttentionError, BackendError  # noqa: E402

LENGTHS = [5, 1, 9, 3]
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.3},
    "both ways": {"causal": False},
    "window of 1": {"window": 1},
    "window": {"window": 4},
    "wide window": {"window": 100},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "all": {"window": 3, "softcap": 2.0, "sinks": True, "scale": 0.5},
}
ON_CPU = ("sdpa", "sdpa_mask")
FORWARD_ON_CPU = (*ON_CPU, "flex")


def inputs(
    tokens: int = sum(LENGTHS), heads: tuple[int, int] = (6, 2), dim: int = 8, seed: int = 0
) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = [(tokens, h, dim) for h in (heads[0], heads[1], heads[1])]
    return [torch.randn(s, generator=random, dtype=torch.float64).requires_grad_() for s in shapes]


def with_sinks(features: dict[str, Any], leaves: list[Tensor]) -> tuple[dict[str, Any], list[Tensor]]:
    """The features with sinks in place of True, and the leaves with them."""
    if not features.get("sinks"):
        return features, leaves
    sinks = torch.linspace(-1, 1, leaves[0].shape[1], dtype=torch.float64).requires_grad_()
    return features | {"sinks": sinks}, [*leaves, sinks]


def assert_close(got: list[Tensor], want: list[Tensor], within: float = 1e-12) -> None:
    for x, y in zip(got, want, strict=True):
        assert (x.double() - y.double()).norm() <= within * (1 + y.double().norm())


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
@pytest.mark.parametrize("backend", ON_CPU)
def test_outputs_and_gradients_are_the_reference(backend: str, features: dict[str, Any]) -> None:
    leaves = inputs()
    features, leaves = with_sinks(features, leaves)
    out = varlen_attention(*leaves[:3], bounds_of(LENGTHS), 9, backend=backend, **features)
    want = attend_slowly(*leaves[:3], LENGTHS, **features)
    grad = torch.randn_like(want)
    assert_close([out], [want])
    assert_close(list(torch.autograd.grad(out, leaves, grad)), list(torch.autograd.grad(want, leaves, grad)))


@pytest.mark.parametrize("features", [FEATURES[name] for name in ("both ways", "window", "all")], ids=str)
def test_flex_is_the_reference_forward(features: dict[str, Any]) -> None:
    features, leaves = with_sinks(features, inputs())
    with torch.no_grad():
        out = varlen_attention(*leaves[:3], bounds_of(LENGTHS), 9, backend="flex", **features)
    assert_close([out], [attend_slowly(*leaves[:3], LENGTHS, **features)], 1e-6)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    heads=st.sampled_from([(1, 1), (4, 4), (6, 2), (3, 1)]),
    window=st.none() | st.integers(1, 13),
    backend=st.sampled_from(ON_CPU),
)
def test_packed_is_the_sequences_alone(
    lengths: list[int], heads: tuple[int, int], window: int | None, backend: str
) -> None:
    q, k, v = (x.detach() for x in inputs(sum(lengths), heads))
    packed = varlen_attention(q, k, v, bounds_of(lengths), max(lengths), window=window, backend=backend)
    alone = [
        varlen_attention(*parts, bounds_of([len(parts[0])]), len(parts[0]), window=window, backend="sdpa")
        for parts in zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    ]
    assert_close([packed], [torch.cat(alone)])


@pytest.mark.parametrize("backend", ON_CPU)
def test_any_strides_and_float32(backend: str) -> None:
    fused = torch.randn(1, 10, sum(LENGTHS), 8)  # as a projection's transposed view: [B, H, T, D]
    q, k, v = (x[0].transpose(0, 1) for x in fused.split([6, 2, 2], 1))
    out = varlen_attention(q, k, v, bounds_of(LENGTHS), 9, backend=backend)
    assert out.shape == q.shape and out.dtype == torch.float32
    assert_close([out], [attend_slowly(q, k, v, LENGTHS)], 1e-5)


@pytest.mark.parametrize("backend", FORWARD_ON_CPU)
def test_sequences_of_one_token_give_their_values(backend: str) -> None:
    """BR-165."""
    q, k, v = (x.detach() for x in inputs(3))
    out = varlen_attention(q, k, v, bounds_of([1, 1, 1]), 1, backend=backend)
    assert_close([out], [v.repeat_interleave(3, 1)])


@pytest.mark.parametrize("backend", ON_CPU)
def test_empty_sequences_at_the_end_change_nothing(backend: str) -> None:
    """BR-163: boundaries filled up, as pad_batch does, are the same sequences, with the same gradients."""
    leaves = inputs(8)
    filled = torch.tensor([0, 5, 8, 8, 8], dtype=torch.int32)
    outs = [varlen_attention(*leaves, c, 5, backend=backend) for c in (filled, bounds_of([5, 3]))]
    grads = [torch.autograd.grad(out.sum(), leaves) for out in outs]
    assert_close([outs[0], *grads[0]], [outs[1], *grads[1]])


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([0, 0, 5, 8], r"cu_seqlens\[1\] repeats 0"),
        ([0, 4, 4, 8], r"cu_seqlens\[2\] repeats 4"),
        ([0, 5, 4, 8], r"cu_seqlens\[2\] is 4, below 5"),
        ([1, 4, 8], r"cu_seqlens\[0\] is 1"),
        ([0, 4], "end at 4 and q has 8 tokens"),
        ([0, 9], "end at 9 and q has 8 tokens"),
        ([0, 8, 5, 8], r"cu_seqlens\[2\] is 5, below 8"),
        ([0, -1, 8], r"cu_seqlens\[1\] is -1, below 0"),
    ],
)
def test_bad_boundaries_are_told_by_their_index(bounds: list[int], message: str) -> None:
    """BR-163, BR-164, BR-166: before anything is launched."""
    q, k, v = inputs(8)
    with pytest.raises(AttentionError, match=message):
        varlen_attention(q, k, v, torch.tensor(bounds, dtype=torch.int32), 8)


def test_boundaries_changed_in_place_are_looked_at_again() -> None:
    q, k, v = inputs(8)
    bounds = bounds_of([3, 5])
    varlen_attention(q, k, v, bounds, 5)
    bounds[1] = 8
    with pytest.raises(AttentionError, match="longest sequence has 8"):
        varlen_attention(q, k, v, bounds, 5)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cu_seqlens": torch.tensor([0, 8])}, "must be int32"),
        ({"cu_seqlens": torch.tensor([[0, 8]], dtype=torch.int32)}, r"int32 \[N \+ 1\]"),
        ({"cu_seqlens": torch.tensor([0], dtype=torch.int32)}, r"N >= 1"),
        ({"cu_seqlens": [0, 8]}, "must be a tensor"),
        ({"cu_seqlens": torch.empty(2, dtype=torch.int32, device="meta")}, "cu_seqlens on meta"),
        ({"max_seqlen": torch.tensor(8)}, "must be a Python int"),
        ({"max_seqlen": 8.0}, "must be a Python int"),
        ({"max_seqlen": 7}, "max_seqlen is 7 and the longest sequence has 8"),
        ({"q": torch.zeros(8, 48)}, r"must be \[T, Hq, D\]"),
        ({"q": torch.zeros(8, 5, 8, dtype=torch.float64)}, "5 heads of q are no multiple of 2"),
        ({"q": torch.zeros(8, 6, 8)}, "must be one floating type"),
        ({"q": torch.zeros(8, 6, 4, dtype=torch.float64)}, "heads of 4 and 8"),
        ({"k": torch.zeros(8, 1, 8, dtype=torch.float64)}, "with the same tokens"),
        ({"v": torch.zeros(8, 2, 8, dtype=torch.float64, device="meta")}, "v on meta"),
        ({"window": 0}, "window is 0"),
        ({"window": 2, "causal": False}, "causal False"),
        ({"softcap": 0.0}, "softcap is 0.0"),
        ({"sinks": torch.zeros(2)}, r"they must be \[6\]"),
        ({"sinks": [0.0] * 6}, "sinks are a list"),
        ({"window": [3]}, r"window is \[3\]; it must be a whole number"),
        ({"window": 2.5}, "window is 2.5"),
        ({"softcap": "30"}, "softcap is '30'; it must be a number"),
        ({"scale": True}, "scale is True; it must be a number"),
        ({"scale": float("nan")}, "scale is nan; it must be a number, and finite"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_calls_that_contradict_themselves_are_refused(changed: dict[str, Any], message: str) -> None:
    """BR-169, BR-170: a longest length that is a tensor is refused, not waited for."""
    q, k, v = (x.detach() for x in inputs(8))
    given = {"q": q, "k": k, "v": v, "cu_seqlens": bounds_of([8]), "max_seqlen": 8} | changed
    with pytest.raises(AttentionError, match=message):
        varlen_attention(**given)


def test_keys_of_other_lengths_than_the_queries_are_refused() -> None:
    """BR-167."""
    q, (_, k, v) = inputs(4)[0], inputs(7)
    with pytest.raises(AttentionError, match="with the same tokens"):
        varlen_attention(q, k, v, bounds_of([4]), 4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_asked_for_by_name_does_it_or_says_why(backend: str) -> None:
    leaves = [x.detach() for x in inputs()]
    try:
        out = varlen_attention(*leaves, bounds_of(LENGTHS), 9, backend=backend)
    except BackendError as error:
        assert backend in str(error) and len(str(error)) > 60
    else:
        assert_close([out], [attend_slowly(*leaves, LENGTHS)])
        assert backend in FORWARD_ON_CPU


def test_flex_on_the_cpu_says_that_it_has_no_backward_pass() -> None:
    with pytest.raises(BackendError, match="no backward pass"):
        varlen_attention(*inputs(), bounds_of(LENGTHS), 9, backend="flex")


def test_a_backend_that_there_is_not_is_an_error_that_names_those_there_are() -> None:
    with pytest.raises(BackendError, match="'fast'.*auto.*sdpa"):
        varlen_attention(*inputs(), bounds_of(LENGTHS), 9, backend="fast")


def test_auto_names_backends_and_ends_with_the_one_that_does_everything() -> None:
    assert {choice.backend for choice in AUTO} <= set(BACKENDS)
    assert AUTO[-1] == Choice("sdpa")


def test_a_row_too_long_for_a_mask_is_refused_before_it_is_made() -> None:
    leaves = [torch.zeros(1, 1, 8).expand(46_341, 1, 8) for _ in range(3)]
    with pytest.raises(BackendError, match="46,341"):
        varlen_attention(*leaves, bounds_of([46_341]), 46_341, backend="sdpa_mask")


def test_a_row_without_tokens_gives_one() -> None:
    q, k, v = inputs(0)
    out = varlen_attention(q, k, v, torch.zeros(2, dtype=torch.int32), 0)
    assert out.shape == (0, 6, 8)


def test_what_is_made_of_boundaries_is_made_once_a_batch() -> None:
    """BR-171: the layers of a step share one look at the boundaries."""
    bounds = bounds_of(LENGTHS)
    layers = [boundaries_of(bounds, 9, sum(LENGTHS)) for _ in range(4)]
    assert all(layer is layers[0] for layer in layers)
    assert layers[0].made("mask", object) is layers[3].made("mask", object)
    assert boundaries_of(bounds_of(LENGTHS), 9, sum(LENGTHS)) is not layers[0]


def test_boundaries_that_were_changed_are_looked_at_again() -> None:
    """In place, for another row or another longest sequence, and between those of two rows that alternate."""
    first, second = bounds_of(LENGTHS), bounds_of(LENGTHS[::-1])
    tokens = sum(LENGTHS)
    kept = [boundaries_of(bounds, 9, tokens) for bounds in (first, second)]
    assert [boundaries_of(bounds, 9, tokens) for bounds in (first, second, first)] == [*kept, kept[0]]
    assert boundaries_of(first, 12, tokens).max_seqlen == 12
    for max_seqlen in (True, 12.0):
        with pytest.raises(AttentionError, match="must be a Python int"):
            boundaries_of(first, max_seqlen, tokens)  # type: ignore[arg-type]
    first.copy_(second)
    assert boundaries_of(first, 12, tokens).lengths() == LENGTHS[::-1]
    first[-1] += 1
    with pytest.raises(AttentionError, match="end at 19 and q has 18"):
        boundaries_of(first, 12, tokens)


def test_boundaries_are_kept_no_longer_than_their_batch() -> None:
    bounds = bounds_of(LENGTHS)
    made = weakref.ref(boundaries_of(bounds, 9, sum(LENGTHS)))
    assert made() is boundaries_of(bounds, 9, sum(LENGTHS))
    del bounds
    assert made() is None


@torch.inference_mode()
def test_boundaries_made_in_inference_mode_are_looked_at_each_time() -> None:
    """Such tensors have no version: nobody could tell that they were changed."""
    bounds, tokens = bounds_of(LENGTHS), sum(LENGTHS)
    q, k, v = (torch.randn(tokens, heads, 8, dtype=torch.float64) for heads in (6, 2, 2))
    copied_from(bounds, bounds)
    out = varlen_attention(q, k, v, bounds, tokens)
    torch.testing.assert_close(out, attend_slowly(q, k, v, LENGTHS))
    bounds.copy_(bounds_of(LENGTHS[::-1]))
    out = varlen_attention(q, k, v, bounds, tokens)
    torch.testing.assert_close(out, attend_slowly(q, k, v, LENGTHS[::-1]))


def test_layers_of_a_batch_are_checked_once_and_other_calls_on_its_boundaries_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def counted(request: Any, backend: str) -> str:
        asked.append(request)
        return choose(request, backend)

    monkeypatch.setattr(attention, "choose", counted)
    bounds = bounds_of(LENGTHS)
    q, k, v = inputs()
    for _ in range(3):
        varlen_attention(q, k, v, bounds, 9)
    assert len(asked) == 1
    with torch.no_grad():
        varlen_attention(q, k, v, bounds, 9)
    sinks = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    for changed in ({"window": 2}, {"softcap": 2.0}, {"sinks": sinks}, {"scale": 2.0}):
        for _ in range(2):
            varlen_attention(q, k, v, bounds, 9, **changed)
    varlen_attention(q[:, :4], k, v, bounds, 9)
    frozen = [x.detach() for x in (q, k, v)]
    varlen_attention(*frozen, bounds, 9, sinks=sinks)  # as above: there are gradients
    varlen_attention(*frozen, bounds, 9, sinks=sinks.detach())
    assert [r.backward for r in asked] == [True, False, True, True, True, True, True, False]
    with pytest.raises(AttentionError, match="5 heads of q"):
        varlen_attention(q[:, :5], k, v, bounds, 9)
    with pytest.raises(BackendError, match="'flash' cannot"):
        varlen_attention(q, k, v, bounds, 9, backend="flash")


@pytest.mark.parametrize("features", [FEATURES["plain"], FEATURES["all"]], ids=["plain", "all"])
@pytest.mark.parametrize("backend", ON_CPU)
def test_a_compiled_call_has_no_graph_break(backend: str, features: dict[str, Any]) -> None:
    """BR-170."""
    features, leaves = with_sinks(features, inputs())

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(bounds: Tensor, longest: int) -> Tensor:
        return varlen_attention(*leaves[:3], bounds, longest, backend=backend, **features) * 1

    out = compiled(bounds_of(LENGTHS), 9)
    want = attend_slowly(*leaves[:3], LENGTHS, **features)
    grad = torch.randn_like(want)
    assert_close([out], [want])
    assert_close(list(torch.autograd.grad(out, leaves, grad)), list(torch.autograd.grad(want, leaves, grad)))


@pytest.mark.parametrize("backend", ON_CPU)
def test_packs_of_any_number_of_sequences_compile_few_times(backend: str) -> None:
    """BR-169, BR-172: 12 packs of 1 to 12 sequences."""
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    torch._dynamo.reset()

    @torch.compile(backend=counter, fullgraph=True)
    def compiled(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int) -> Tensor:
        return varlen_attention(q, k, v, bounds, longest, backend=backend)

    q, k, v = (x.detach() for x in inputs(24))
    for sequences in range(1, 13):
        lengths = [24 // sequences] * (sequences - 1)
        lengths.append(24 - sum(lengths))
        out = compiled(q, k, v, bounds_of(lengths), max(lengths))
        assert_close([out], [attend_slowly(q, k, v, lengths)])
    assert counter.frame_count <= 4
