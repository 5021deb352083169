"""The backend of our own kernels: the same attention, tiles once a batch, taken where it was measured."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from attending import attend_slowly, bounds_of, pretend  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from padless.kernels import capture as kernels_capture  # noqa: E402
from padless.kernels import short_attention_work  # noqa: E402
from padless.kernels.short_attention_work import work_list_on_device  # noqa: E402
from padless.runtime.attention import (  # noqa: E402
    BACKENDS,
    Options,
    Request,
    boundaries_of,
    choose,
    choose_parts,
    may_be_short,
)
from padless.runtime.attention import backend as attention_backend  # noqa: E402
from padless.runtime.attention import short as short  # noqa: E402
from padless.runtime.attention.by_lengths import forward_by_lengths  # noqa: E402
from padless.runtime.errors import BackendError  # noqa: E402
from padless.runtime.varlen_batch import VarlenBatch  # noqa: E402

LENGTHS = [5, 1, 9, 3]
SHORT = BACKENDS["short"]
PLAIN = Options(True, 8**-0.5, None, None, None, False)


def request(**changed: Any) -> Request:
    given: dict[str, Any] = {
        "device": torch.device("cuda"), "dtype": torch.bfloat16, "head_dim": 128, "q_heads": 32, "k_heads": 8,
        "tokens": 16_384, "sequences": 100, "max_seqlen": 700, "mean_length": 230.0, "causal": True,
        "window": False, "softcap": False, "sinks": False, "deterministic": False, "backward": True,
    }  # fmt: skip
    return Request(**given | changed)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    return partial(pretend, monkeypatch)


@pytest.mark.parametrize(
    "features", [{}, {"scale": 0.3}, {"window": 3}, {"window": 2, "softcap": 1.5}], ids=str
)
def test_it_is_the_reference(features: dict[str, Any]) -> None:
    leaves = [torch.randn(18, h, 8, dtype=torch.float64, requires_grad=True) for h in (6, 2, 2)]
    boundaries = boundaries_of(bounds_of(LENGTHS), 9, 18)
    out = SHORT.forward(*leaves, boundaries, PLAIN._replace(**features))
    want = attend_slowly(*leaves, LENGTHS, **features)
    grad = torch.randn_like(want)
    assert torch.allclose(out, want)
    for x, y in zip(*(torch.autograd.grad(o, leaves, grad) for o in (out, want)), strict=True):
        assert torch.allclose(x, y)


def test_tiles_are_listed_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    listed = short_attention_work.work_list

    def counted(*args: Any) -> Any:
        calls.append(args)
        return listed(*args)

    monkeypatch.setattr(short_attention_work, "work_list", counted)
    bounds = bounds_of(LENGTHS)
    for _ in range(3):
        q, k, v = (torch.randn(18, h, 8) for h in (6, 2, 2))
        SHORT.forward(q, k, v, boundaries_of(bounds, 9, 18), PLAIN)
    assert len(calls) == 1


def test_a_batch_on_a_device_knows_its_boundaries_without_waiting() -> None:
    """A meta tensor has no values to wait for."""
    bounds = bounds_of(LENGTHS)
    batch = VarlenBatch(cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=9).to("meta")
    moved = batch["cu_seq_lens_q"]
    assert moved.is_meta and boundaries_of(moved, 9, 18).lengths() == LENGTHS
    bounds[1:] += 1  # the copy on the device is what it was
    assert boundaries_of(moved, 10, 18).lengths() == LENGTHS


def test_auto_takes_it_for_long_rows_of_short_sequences(device: Callable[..., None]) -> None:
    device((9, 0))
    assert choose(request()) == "short"
    assert choose(request(tokens=4_095)) == "flash"
    assert choose(request(mean_length=8_192.0)) == "short"
    assert choose(request(mean_length=8_192.1)) == "flash"


@pytest.mark.parametrize("library", ["flash-attn-4", "FlashAttention-3 (flash_attn_interface)"])
def test_a_faster_library_takes_longer_ones(device: Callable[..., None], library: str) -> None:
    device((9, 0), library)
    assert choose(request(mean_length=700.0)) == "short"
    assert choose(request(mean_length=701.0)).startswith("flash_attn_")


def test_boundaries_that_only_the_device_knows_are_not_waited_for(device: Callable[..., None]) -> None:
    device((9, 0))
    assert choose(request(mean_length=None)) == "flash"
    assert choose(request(mean_length=None), "short") == "short"


def test_a_compiled_program_takes_it_when_it_runs(device: Callable[..., None]) -> None:
    """What is traced has no lengths yet."""
    device((9, 0))
    unknown = request(mean_length=None)
    assert may_be_short(unknown)
    assert not may_be_short(unknown._replace(tokens=4_095))
    assert not may_be_short(unknown._replace(causal=False))
    assert not may_be_short(unknown._replace(sinks=True))
    device((8, 0))
    assert not may_be_short(unknown)


@pytest.mark.parametrize("again", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("features", [{}, {"scale": 0.3}, {"window": 2, "softcap": 1.5}], ids=str)
def test_a_compiled_program_lists_tiles_once_for_all_layers(
    features: dict[str, Any], again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And for its way back, and where that computes forward again; the batch's own boundaries get there."""
    listed, calls = short_attention_work.work_list, []
    monkeypatch.setattr(short_attention_work, "work_list", lambda *x: calls.append(x) or listed(*x))
    leaves = [torch.randn(18, h, 8, dtype=torch.float64, requires_grad=True) for h in (6, 2, 2)]
    options = PLAIN._replace(**features)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(q: Any, k: Any, v: Any, bounds: Any, longest: int) -> Any:
        for _ in range(2):
            q = forward_by_lengths("short", q * 1, k, v, boundaries_of(bounds, longest, q.shape[0]), options)
        return q

    bounds = torch.empty(9, dtype=torch.int32)[2:7].copy_(bounds_of(LENGTHS))  # part of a batch's one buffer
    run = partial(checkpoint, compiled, use_reentrant=False) if again else compiled
    out = run(*leaves, bounds, 9)
    once = attend_slowly(*leaves, LENGTHS, **features)
    want = attend_slowly(once, *leaves[1:], LENGTHS, **features)
    grad = torch.randn_like(want)
    assert torch.allclose(out, want)
    for x, y in zip(*(torch.autograd.grad(o, leaves, grad) for o in (out, want)), strict=True):
        assert torch.allclose(x, y)
    assert len(calls) == 1
    bounds.copy_(bounds_of([1, 5, 9, 3]))  # another batch in the same memory
    once = attend_slowly(*leaves, [1, 5, 9, 3], **features)
    want = attend_slowly(once, *leaves[1:], [1, 5, 9, 3], **features)
    assert torch.allclose(run(*leaves, bounds, 9), want)
    assert len(calls) == 2


def test_lengths_are_those_of_the_sequences_that_tokens_lie_in() -> None:
    """Eight sequences of one token and one of 8 are no row of short sequences."""
    assert boundaries_of(bounds_of([8, *[1] * 8]), 8, 16).mean_length() == (64 + 8) / 16
    assert boundaries_of(bounds_of([4, 4, 0, 0]), 4, 8).mean_length() == 4
    assert boundaries_of(torch.empty(3, dtype=torch.int32, device="meta"), 4, 8).mean_length() is None


def test_a_choice_leaves_devices_that_were_not_measured(device: Callable[..., None]) -> None:
    device((8, 0))
    assert choose(request()) == "flash"
    assert choose(request(), "short") == "short"


@pytest.fixture
def capture(device: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Says that calls, on CPU tensors as well, go into the graph of this number, or into none."""
    device((9, 0))

    def begin(number: int | None) -> None:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: number is not None)
        monkeypatch.setattr(kernels_capture, "tells_captures", lambda: True)
        monkeypatch.setattr(kernels_capture, "capture_number", lambda: number)
        for module in (short, attention_backend):
            monkeypatch.setattr(module, "is_captured", lambda device: number is not None)

    return begin


def test_a_graph_that_is_captured_lists_tiles_of_boundaries_that_nobody_looks_at(
    capture: Callable[[int | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be replayed over others in the same memory; and what one graph lists is listed in no other."""
    bounds = bounds_of(LENGTHS)
    boundaries = boundaries_of(bounds, 9, 18)
    monkeypatch.setattr(boundaries, "lengths", lambda: pytest.fail("lengths were looked at"))
    made = []
    monkeypatch.setattr(
        short_attention_work,
        "work_list_on_device",
        lambda *given: made.append(given) or work_list_on_device(*given),
    )
    leaves = [torch.randn(18, h, 8, dtype=torch.float64) for h in (6, 2, 2)]
    for number, lists in ((3, 1), (3, 1), (4, 2), (3, 2)):
        capture(number)
        out = SHORT.forward(*leaves, boundaries, PLAIN)
        assert torch.allclose(out, attend_slowly(*leaves, LENGTHS))
        assert len(made) == lists
    assert made[0][0] is boundaries.cu_seqlens


def test_a_graph_that_is_captured_may_take_it_where_captures_can_be_told_apart(
    capture: Callable[[int | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    capture(1)
    assert choose(request()) == "short"
    monkeypatch.setattr(kernels_capture, "tells_captures", lambda: False)
    assert choose(request()) == "flash"
    with pytest.raises(BackendError, match="does not tell for which graph"):
        choose(request(), "short")


@pytest.mark.parametrize("backend", ["flex", "xformers", "sdpa", "sdpa_mask"])
def test_a_graph_that_is_captured_takes_nothing_that_boundaries_were_made_into(
    capture: Callable[[int | None], None], backend: str
) -> None:
    capture(1)
    with pytest.raises(BackendError, match="a CUDA graph may be replayed over others"):
        choose(request(), backend)


def test_a_graph_that_is_captured_cuts_no_row_in_two(
    device: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the short sequences of another batch begin is not known."""
    device((9, 0), "flash-attn-4")
    lengths = [8_192, *[100] * 80]
    boundaries = boundaries_of(bounds_of(lengths), 8_192, sum(lengths))
    row = request(tokens=sum(lengths), mean_length=4_200.0)
    assert [name for _, name in choose_parts(row, boundaries)] == ["flash_attn_4", "short"]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(kernels_capture, "tells_captures", lambda: True)
    assert choose_parts(row, boundaries) == [(boundaries, "flash_attn_4")]


@pytest.mark.parametrize("changed", [{"causal": False}, {"head_dim": 264}, {"dtype": torch.float32}], ids=str)
def test_what_it_cannot_do_goes_to_a_library(device: Callable[..., None], changed: dict[str, Any]) -> None:
    device((9, 0))
    assert choose(request(**changed)) != "short"
    with pytest.raises(BackendError, match="'short' cannot do this"):
        choose(request(**changed), "short")


def test_the_driver_is_asked_for_the_number_of_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a stand-in that answers as the driver does: stream, status and number by reference."""
    asked: list[int] = []

    def tell(stream: Any, status: Any, number: Any) -> int:
        asked.append(stream.value)
        status._obj.value, number._obj.value = 1, 2**40 + 3
        return failed

    failed = 0
    monkeypatch.setattr(kernels_capture, "_ask", lambda: tell)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=2**45))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert kernels_capture.capture_number() is None and not asked
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert kernels_capture.capture_number() == 2**40 + 3 and asked == [2**45]
    failed = 901
    with pytest.raises(OSError, match="failed with 901"):
        kernels_capture.capture_number()
