"""Backends whose kernels need a GPU, on the CPU: stand-ins take the calls as the libraries document them.

A stand-in checks what it is given and computes by plain products, window and grouping by its library's
own words, so a backend that turns padless' words into wrong ones gives wrong numbers here. The kernels
themselves are tested on a device, in test_attention_gpu.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from attending import attend_slowly, bounds_of  # noqa: E402
from torch import Tensor  # noqa: E402

from padless.runtime.attention import BACKENDS, Boundaries, Options, Request, backend, choice, choose  # noqa: E402
from padless.runtime.errors import BackendError  # noqa: E402

LENGTHS = [5, 1, 9, 3]
TOKENS = sum(LENGTHS)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "both ways": {"causal": False, "scale": 0.2},
    "window": {"window": 4},
    "window of 1": {"window": 1},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "sinks and window": {"sinks": True, "window": 3},
    "deterministic": {"deterministic": True},
}
HAS = {
    "flash": {"window", "sinks", "deterministic"},
    "flash_attn_2": {"window", "softcap", "deterministic"},
    "flash_attn_3": {"window", "softcap", "deterministic"},
    "flash_attn_4": {"window", "softcap", "sinks", "deterministic"},
    "flex": {"window", "softcap", "sinks", "deterministic"},
    "efficient": {"window"},
    "xformers": {"window"},
}


def request(**changed: Any) -> Request:
    """What a usual call on a GPU asks for."""
    usual: dict[str, Any] = {
        "device": torch.device("cuda", 0), "dtype": torch.bfloat16, "head_dim": 128, "q_heads": 32,
        "k_heads": 8, "tokens": 16_384, "sequences": 100, "max_seqlen": 800,
        "mean_length": None, "causal": True, "window": False, "softcap": False, "sinks": False,
        "deterministic": False, "backward": True,
    }  # fmt: skip
    return Request(**usual | changed)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes devices of a compute capability, and libraries there or not."""

    def make(capability: tuple[int, int], missing: str | None = None) -> None:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        for module in [
            choice,
            backend,
            *(sys.modules[f"padless.runtime.attention.{name}"] for name in HAS),
        ]:
            for name, value in (
                ("capability_of", lambda device: capability),
                ("import_refusal", lambda module, package: missing),
            ):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, value)

    return make


@pytest.mark.parametrize("feature", ["window", "softcap", "sinks", "deterministic"])
@pytest.mark.parametrize("name", HAS)
def test_a_backend_without_a_feature_says_so(name: str, feature: str, gpu: Any) -> None:
    gpu((9, 0))
    reason = BACKENDS[name].unavailable(request(**{feature: True}))
    assert reason == (None if feature in HAS[name] else f"it has no {feature}")


@pytest.mark.parametrize(
    ("name", "capability", "changed", "reason"),
    [
        ("flash", (7, 5), {}, "needs compute capability 8.0 and the device has 7.5"),
        ("flash", (9, 0), {"dtype": torch.float32}, "float16, bfloat16 and q is float32"),
        ("flash", (9, 0), {"head_dim": 512}, "at most 256 .* 512"),
        ("flash", (9, 0), {"head_dim": 100}, "multiples of 8 .* 100"),
        ("flash", (9, 0), {"sequences": 70_000, "backward": False}, "65,535 sequences, and there are 70,000"),
        ("flash", (9, 0), {"device": torch.device("cpu")}, "q is on cpu"),
        ("flash_attn_3", (8, 0), {}, "needs compute capability 9.0"),
        ("flash_attn_3", (10, 0), {}, "for Hopper"),
        ("flash_attn_3", (9, 0), {"deterministic": True, "head_dim": 256}, "no deterministic"),
        ("flash_attn_4", (12, 0), {}, "9 to 11 and the device has 12"),
        ("flash_attn_4", (10, 0), {"head_dim": 192}, "at most 128, or of 256"),
        ("flash_attn_4", (9, 0), {"tokens": 524_288}, "counts elements in 32 bits"),
        ("flex", (7, 5), {}, "needs compute capability 8.0"),
        ("flex", (9, 0), {"head_dim": 8}, "at least 16"),
        ("flex", (9, 0), {"tokens": 524_288}, "counts elements in 32 bits"),
        ("efficient", (9, 0), {"tokens": 524_288}, "counts elements in 32 bits"),
        ("efficient", (7, 5), {}, "needs compute capability 8.0"),
        ("xformers", (7, 5), {}, "needs compute capability 8.0"),
    ],
)
def test_what_a_backend_cannot_it_says(
    name: str, capability: tuple[int, int], changed: dict[str, Any], reason: str, gpu: Any
) -> None:
    gpu(capability)
    with pytest.raises(BackendError, match=rf"'{name}' cannot do this: .*{reason}"):
        choose(request(**changed), name)


@pytest.mark.parametrize("name", ["flash_attn_2", "flash_attn_3", "flash_attn_4", "flex", "xformers"])
def test_a_library_that_is_not_there_is_named(name: str, gpu: Any) -> None:
    gpu((9, 0), missing="the library is not installed")
    with pytest.raises(BackendError, match="the library is not installed"):
        choose(request(), name)


def test_a_library_that_does_not_import_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "broken_attention.py").write_text("raise OSError('libcudart.so.12: cannot open')")
    (tmp_path / "needy_attention.py").write_text("import not_there_at_all")
    monkeypatch.syspath_prepend(tmp_path)
    assert (
        backend.import_refusal("broken_attention", "B") == "B does not import: libcudart.so.12: cannot open"
    )
    assert "No module named 'not_there_at_all'" in str(backend.import_refusal("needy_attention", "N"))
    assert backend.import_refusal("absent_attention.cute", "A") == "A is not installed"
    assert backend.import_refusal("json", "json") is None


@pytest.mark.parametrize("name", ["flash", "flash_attn_2"])
def test_more_sequences_than_the_backward_pass_can_count_are_refused(name: str, gpu: Any) -> None:
    """BR-163's neighbour: (tokens + 128 x sequences) x heads x head size in 32 bits."""
    gpu((9, 0))
    most = (2**31 - 1) // (32 * 128) // 129  # of one token each
    fits = {"tokens": most, "sequences": most}
    beyond = {"tokens": most + 1, "sequences": most + 1}
    assert BACKENDS[name].unavailable(request(**fits)) is None
    assert "--max-sequences-per-pack" in str(BACKENDS[name].unavailable(request(**beyond)))
    assert BACKENDS[name].unavailable(request(**beyond, backward=False)) is None


@pytest.mark.parametrize(
    ("capability", "changed", "expected"),
    [
        ((7, 5), {"dtype": torch.float16}, "efficient"),
        ((7, 5), {"dtype": torch.float16, "softcap": True}, "sdpa"),
        ((8, 0), {}, "flash"),
        ((8, 0), {"sinks": True, "window": True}, "flash"),
        ((8, 0), {"softcap": True}, "flex"),
        ((8, 0), {"dtype": torch.float32}, "efficient"),
        ((8, 0), {"head_dim": 512}, "efficient"),
        ((8, 0), {"dtype": torch.float64}, "sdpa"),
        ((9, 0), {"device": torch.device("cpu"), "dtype": torch.float32}, "sdpa"),
        ((9, 0), {"device": torch.device("cpu"), "backward": False}, "sdpa"),
    ],
)
def test_auto_without_further_libraries(
    capability: tuple[int, int], changed: dict[str, Any], expected: str, gpu: Any, monkeypatch: Any
) -> None:
    gpu(capability)
    for name in ("flash_attn_2", "flash_attn_3", "flash_attn_4", "xformers"):
        module = sys.modules[f"padless.runtime.attention.{name}"]
        monkeypatch.setattr(module, "import_refusal", lambda *_: "it is not installed")
    assert choose(request(**changed)) == expected


def test_auto_takes_flash_attention_4_where_the_row_is_worth_its_host_time(gpu: Any) -> None:
    gpu((9, 0))
    assert choose(request(tokens=8_192)) == "flash_attn_4"
    assert choose(request(tokens=8_191)) == "flash"
    gpu((8, 0))
    assert choose(request(softcap=True)) == "flash_attn_2"


def band(q: Tensor, bounds: Tensor, left: int | None, right: int | None, causal: bool) -> Tensor:
    """[T, T] bool as the flash libraries say it: keys from i - left to i + right, None without a limit."""
    at = torch.arange(len(q))
    sequence = torch.bucketize(at, bounds[1:], right=True)
    seen = sequence[:, None] == sequence
    apart = at[:, None] - at
    if causal:
        right = 0
    if left is not None:
        seen &= apart <= left
    return seen if right is None else seen & (-apart <= right)


def scores_of(q: Tensor, k: Tensor, scale: float, softcap: float, seen: Tensor) -> Tensor:
    """[Hq, T, T]."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    return scores.masked_fill(~seen, -torch.inf)


def products(q: Tensor, v: Tensor, shares: Tensor) -> Tensor:
    return torch.einsum("hqk,khd->qhd", shares, v.repeat_interleave(q.shape[1] // v.shape[1], 1))


def flash_attn(open_end: int | None, *, gives_lse: bool) -> Callable[..., Any]:
    """flash_attn_varlen_func of a library that writes 'no limit' so."""

    def varlen(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int | None, int | None],
        softcap: float,
        deterministic: bool,
        learnable_sink: Tensor | None = None,
    ) -> Any:
        assert type(max_seqlen_q) is int and max_seqlen_q == max_seqlen_k == max(LENGTHS)
        assert cu_seqlens_q.dtype == torch.int32 and torch.equal(cu_seqlens_q, cu_seqlens_k)
        assert isinstance(softcap, float) and isinstance(deterministic, bool)
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        left, right = (None if side == open_end else side for side in window_size)
        scores = scores_of(q, k, softmax_scale, softcap, band(q, cu_seqlens_q, left, right, causal))
        if learnable_sink is not None:
            sink = learnable_sink[:, None, None].expand(*scores.shape[:2], 1)
            scores = torch.cat([scores, sink], -1)
        out = products(q, v, scores.softmax(-1)[..., : len(q)])
        return (out, scores.logsumexp(-1)) if gives_lse else out

    return varlen


class Bias(SimpleNamespace):
    """A block-diagonal mask of xFormers."""

    @classmethod
    def from_seqlens(cls, seqlens: list[int], *, device: torch.device) -> Bias:
        assert all(type(length) is int and length > 0 for length in seqlens)
        return cls(causal=cls.__name__ == "BlockDiagonalCausalMask", window=None, bounds=bounds_of(seqlens))

    def make_local_attention(self, window_size: int) -> Bias:
        assert not self.causal  # only BlockDiagonalMask has it
        return Bias(causal=True, window=window_size, bounds=self.bounds)


def memory_efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, *, attn_bias: Bias, scale: float
) -> Tensor:
    """Keys greater than i - window; four dimensions, as many heads of k as of q."""
    assert query.ndim == 4 and query.shape == key.shape == value.shape
    q, k, v = query[0], key[0], value[0]
    left = None if attn_bias.window is None else attn_bias.window - 1
    seen = band(q, attn_bias.bounds, left, None, attn_bias.causal)
    return products(q, v, scores_of(q, k, scale, 0.0, seen).softmax(-1))[None]


def aten_flash_forward(
    q: Tensor, k: Tensor, v: Tensor, cum_q: Tensor, cum_k: Tensor, max_q: int, max_k: int, dropout: float,
    causal: bool, debug: bool, *, scale: float, window_size_left: int | None, window_size_right: int | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The log-sum-exp is [Hq, T]."""
    assert max_q == max_k == max(LENGTHS) and dropout == 0.0 and not debug
    scores = scores_of(q, k, scale, 0.0, band(q, cum_q, window_size_left, window_size_right, causal))
    nothing = torch.empty(0)
    return products(q, v, scores.softmax(-1)), scores.logsumexp(-1), nothing, nothing, nothing


def aten_flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cum_q: Tensor, cum_k: Tensor,
    max_q: int, max_k: int, dropout: float, causal: bool, random: Tensor, unused: Tensor, *, scale: float,
    window_size_left: int | None, window_size_right: int | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """As the kernel does it: shares from the log-sum-exp, and sum(grad * out) for each row."""
    groups = q.shape[1] // k.shape[1]
    scores = scores_of(q, k, scale, 0.0, band(q, cum_q, window_size_left, window_size_right, causal))
    shares = (scores - lse[..., None]).exp()
    k_all, v_all = (x.repeat_interleave(groups, 1) for x in (k, v))
    grad_shares = torch.einsum("qhd,khd->hqk", grad, v_all)
    grad_scores = shares * (grad_shares - (grad * out).sum(-1).T[..., None]) * scale
    grad_q = torch.einsum("hqk,khd->qhd", grad_scores, k_all)
    grad_k = torch.einsum("hqk,qhd->khd", grad_scores, q)
    grad_v = torch.einsum("hqk,qhd->khd", shares, grad)
    summed = (x.view(len(x), k.shape[1], groups, -1).sum(2) for x in (grad_k, grad_v))
    return grad_q, *summed


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for all of them."""

    def module(name: str, **members: Any) -> None:
        made = ModuleType(name)
        vars(made).update(members)
        monkeypatch.setitem(sys.modules, name, made)

    causal_bias = type("BlockDiagonalCausalMask", (Bias,), {})
    bias = type("BlockDiagonalMask", (Bias,), {})
    module("flash_attn")
    two, three, four = (flash_attn(*x, gives_lse=y) for x, y in (([-1], False), ([-1], True), ([None], True)))
    module("flash_attn.flash_attn_interface", flash_attn_varlen_func=two)
    module("flash_attn_interface", flash_attn_varlen_func=three)
    module("flash_attn.cute", flash_attn_varlen_func=four)
    module("xformers")
    module("xformers.ops", memory_efficient_attention=memory_efficient_attention)
    module("xformers.ops.fmha")
    module("xformers.ops.fmha.attn_bias", BlockDiagonalMask=bias, BlockDiagonalCausalMask=causal_bias)
    for name, stand_in in (("forward", aten_flash_forward), ("backward", aten_flash_backward)):
        operator = SimpleNamespace(default=stand_in)
        monkeypatch.setattr(torch.ops.aten, f"_flash_attention_{name}", operator)
    monkeypatch.setattr(
        sys.modules["padless.runtime.attention.flash"], "_deterministic_backward", aten_flash_backward
    )


@pytest.mark.parametrize(
    ("name", "case"),
    [
        (name, case)
        for name in ("flash", "flash_attn_2", "flash_attn_3", "flash_attn_4", "xformers")
        for case, features in CASES.items()
        if set(features) - {"causal", "scale"} <= HAS[name]
    ],
)
def test_calls_say_what_is_meant(name: str, case: str, libraries: None) -> None:
    features = dict(CASES[case])
    fused = torch.randn(1, 10, 8, TOKENS, dtype=torch.float64).transpose(2, 3)  # no contiguous last dimension
    leaves = [x[0].transpose(0, 1).requires_grad_() for x in fused.split([6, 2, 2], 1)]
    sinks = torch.linspace(-1, 1, 6, dtype=torch.float64).requires_grad_() if features.get("sinks") else None
    options = Options(
        causal=features.get("causal", True),
        scale=features.get("scale", 8**-0.5),
        window=features.get("window"),
        softcap=features.get("softcap"),
        sinks=sinks,
        deterministic=features.pop("deterministic", False),
    )
    if sinks is not None:
        features["sinks"] = sinks
        leaves.append(sinks)
    q, k, v = leaves[:3]
    boundaries = Boundaries(bounds_of(LENGTHS), max(LENGTHS), TOKENS)
    out = BACKENDS[name].forward(q, k, v, boundaries, options)
    want = attend_slowly(q, k, v, LENGTHS, **features)
    torch.testing.assert_close(out, want)
    grad = torch.randn_like(want)
    got = torch.autograd.grad(out, leaves, grad)
    for x, y in zip(got, torch.autograd.grad(want, leaves, grad), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("name", ["flash", "efficient"])
def test_aten_takes_the_calls_as_they_are(name: str, window: int | None) -> None:
    """The real operators' schemas and shape functions, on tensors without memory."""
    q, k, v = (
        torch.empty(TOKENS, heads, 64, dtype=torch.float16, device="meta", requires_grad=True)
        for heads in (6, 2, 2)
    )
    bounds = torch.empty(5, dtype=torch.int32, device="meta")
    options = Options(True, 0.1, window, None, None, False)
    out = BACKENDS[name].forward(q, k, v, Boundaries(bounds, 9, TOKENS), options)
    grads = torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    assert out.shape == q.shape and out.dtype == q.dtype
    assert [x.shape for x in grads] == [x.shape for x in (q, k, v)]
