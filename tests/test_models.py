"""A prepared model gives a packed batch what it gives each sequence alone, and everything else as before."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import transformers
from pictures import MODELS, OWN_ROTATION
from tiny_models import FAMILIES, UNLISTED, alone, packed, step, tiny
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from padless.runtime.attention import BACKENDS
from padless.runtime.errors import AttentionError, IsolationError, ModelError
from padless.runtime.loss import step_targets
from padless.runtime.model_families import ROTARY, find_decoder
from padless.runtime.model_wiring import turns_by_kernel
from padless.runtime.models import prepare_model, restore_model
from padless.runtime.static import pad_batch
from padless.runtime.varlen_batch import VarlenBatch

LENGTHS = [5, 1, 9, 3]
CLOSE = dict(atol=1e-5, rtol=1e-5)
ON_CPU = ("auto", "sdpa", "sdpa_mask")
both = pytest.mark.parametrize("family", FAMILIES)


@torch.no_grad()
def logits_alone(model: Any, batch: VarlenBatch) -> Tensor:
    return torch.cat(
        [model(input_ids=one["input_ids"], use_cache=False).logits for one in alone(batch)], dim=1
    )


def test_every_family_of_the_table_is_tried() -> None:
    assert set(FAMILIES) | set(MODELS) - OWN_ROTATION == set(ROTARY)
    assert set(ON_CPU) <= {"auto", *BACKENDS}


@both
@pytest.mark.parametrize("backend", ON_CPU)
def test_packed_equals_unpacked_in_logits_loss_and_gradients(family: str, backend: str) -> None:
    """BR-001, BR-020, BR-021: no token sees or is trained on a neighbour."""
    model, batch = tiny(family), packed(LENGTHS)
    targets = step_targets([batch])
    logits = logits_alone(model, batch)

    def apart() -> Tensor:
        losses = [
            model(**one, use_cache=False, num_items_in_batch=targets).loss
            for one in alone(batch)
            if one["input_ids"].shape[1] > 1
        ]
        return torch.stack(losses).sum()

    loss, gradients = step(model, apart)
    prepare_model(model, attention=backend, check=False)
    assert all(turns_by_kernel(module) for module in find_decoder(model).attention)
    with torch.no_grad():
        torch.testing.assert_close(model(**batch.model_inputs()).logits, logits, **CLOSE)
    packed_loss, packed_gradients = step(
        model, lambda: model(**batch.model_inputs(), num_items_in_batch=targets).loss
    )
    torch.testing.assert_close(packed_loss, loss, **CLOSE)
    assert packed_gradients.keys() == gradients.keys() and len(gradients) > 10
    for name, gradient in gradients.items():
        torch.testing.assert_close(packed_gradients[name], gradient, **CLOSE, msg=name)


@both
def test_padded_batches_and_generation_are_what_they_were(family: str) -> None:
    model = tiny(family)
    ids = torch.randint(3, 96, (2, 7), generator=torch.Generator().manual_seed(1))
    left, right = torch.ones_like(ids), torch.ones_like(ids)
    left[0, :3] = 0
    right[1, 4:] = 0

    @torch.no_grad()
    def outputs() -> list[Tensor]:
        found = [model(input_ids=ids, attention_mask=mask).logits for mask in (left, right)]
        found.append(model(input_ids=ids).logits)
        found.append(
            model.generate(ids, attention_mask=left, max_new_tokens=16, do_sample=False, eos_token_id=None)
        )
        return found

    before = outputs()
    prepare_model(model, check=True)
    model(**packed(LENGTHS).model_inputs())
    for now, then in zip(outputs(), before, strict=True):
        assert torch.equal(now, then)
    assert before[-1].shape == (2, 7 + 16)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_restored_models_are_the_first_ones(implementation: str) -> None:
    model, batch = tiny("qwen3", attn_implementation=implementation), packed(LENGTHS)
    settings = model.config.to_dict()
    attributes = [sorted(vars(module)) for module in model.modules()]
    before = model(**batch.model_inputs()).logits
    prepare_model(model, check=True)
    assert model.config.to_dict() == settings and model.config._attn_implementation == implementation
    assert model is restore_model(model)
    assert [sorted(vars(module)) for module in model.modules()] == attributes
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert torch.equal(model(**batch.model_inputs()).logits, before)
    restore_model(model)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_autocast_trains_packs_as_it_trains_sequences(family: str) -> None:
    """The check before the first batch runs under it too, and knows that 16 bits round."""
    model, batch = tiny(family), packed(LENGTHS)
    exact = logits_alone(model, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        apart = logits_alone(model, batch)
        together = prepare_model(model)(**batch.model_inputs()).logits
    noise = (apart - exact).abs().max()
    assert noise > 0 and (together - apart).abs().max() <= 2 * noise
    together.float().logsumexp(-1).sum().backward()
    assert all(x.grad is None or x.grad.dtype is torch.float32 for x in model.parameters())


def test_another_model_of_the_same_class_sees_nothing() -> None:
    first, second = tiny("llama"), tiny("llama")
    modeling = __import__("sys").modules[type(first).__module__]
    names = dict(vars(modeling))
    registered = dict(transformers.AttentionInterface._global_mapping)
    prepare_model(first, check=True)
    assert dict(vars(modeling)) == names
    assert dict(transformers.AttentionInterface._global_mapping) == registered
    assert type(second.model.layers[0].self_attn).forward is second.model.layers[0].self_attn.forward.__func__
    batch = packed(LENGTHS).model_inputs()
    prepare_model(second, attention="sdpa_mask", rope=False)
    assert torch.allclose(first(**batch).logits, second(**batch).logits, atol=1e-5)
    restore_model(first)
    assert torch.allclose(first(**batch).logits, second(**batch).logits, atol=1e-5)


def test_preparing_twice_is_preparing_once() -> None:
    model = tiny("llama")
    attributes = [sorted(vars(module)) for module in model.modules()]
    prepare_model(prepare_model(model), attention="sdpa_mask")
    assert len(model.model._forward_pre_hooks) == 1
    restore_model(model)
    assert [sorted(vars(module)) for module in model.modules()] == attributes


def test_copies_of_a_prepared_model_are_prepared_and_stand_on_their_own() -> None:
    model, batch = prepare_model(tiny("llama"), check=True), packed(LENGTHS)
    expected = model(**batch.model_inputs()).logits
    twin = copy.deepcopy(model)
    restore_model(model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.model.layers[0].self_attn.q_proj.weight.zero_()
    assert torch.equal(twin(**batch.model_inputs()).logits, expected)
    restore_model(twin)
    assert not twin.model._forward_pre_hooks and "forward" not in vars(twin.model.layers[0].self_attn)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_layers_keep_sequences_apart(reentrant: bool) -> None:
    """BR-001 under gradient checkpointing: what recomputes in backward has the boundaries too."""
    batch = packed(LENGTHS).model_inputs()
    model = prepare_model(tiny("qwen3"), check=True).train()
    _, expected = step(model, lambda: model(**batch).loss)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    _, found = step(model, lambda: model(**batch).loss)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, **CLOSE, msg=name)


def test_two_rows_with_boundaries_over_both_are_right() -> None:
    model, batch = prepare_model(tiny("qwen2"), check=True), packed([6, 3, 5, 4])
    expected = model(**batch.model_inputs()).logits
    two = dict(batch.model_inputs(), labels=None, seq_idx=None)
    for name in ("input_ids", "position_ids"):
        two[name] = batch[name].view(2, 9)
    assert torch.allclose(model(**two).logits.flatten(0, 1), expected[0], atol=1e-5)


def test_positions_follow_from_boundaries_where_they_are_not_given() -> None:
    model, batch = prepare_model(tiny("qwen3"), check=True), packed(LENGTHS).model_inputs()
    assert torch.equal(model(**dict(batch, position_ids=None)).logits, model(**batch).logits)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(attention_mask=torch.ones(1, 18)), "attention_mask"),
        (dict(attention_mask=torch.ones(1, 1, 18, 18)), "attention_mask"),
        (dict(past_key_values=transformers.DynamicCache()), "cache"),
        (dict(max_length_q=None), "max_length_q is missing"),
        (dict(cu_seq_lens_q=None), "cu_seq_lens_q is missing"),
        (dict(cu_seq_lens_k=torch.tensor([0, 18], dtype=torch.int32)), "cu_seq_lens_k"),
        (dict(cu_seq_lens_k=torch.tensor([0, 1, 2, 3, 18], dtype=torch.int32)), "give the same boundaries"),
    ],
)
def test_calls_that_say_who_sees_whom_twice_or_by_half_are_refused(change: dict[str, Any], says: str) -> None:
    """BR-002: never plain causal attention in silence."""
    model = prepare_model(tiny("llama"), check=True)
    with pytest.raises(ModelError, match=says):
        model(**dict(packed(LENGTHS).model_inputs(), **change))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(max_length_q=torch.tensor(9)), "int"),
        (dict(max_length_q=3), "max_seqlen is 3"),
        (dict(cu_seq_lens_q=torch.tensor([0, 5, 6, 15, 17], dtype=torch.int32)), "end at 17"),
        (dict(cu_seq_lens_q=torch.tensor([0, 5, 6, 15, 18])), "int32"),
    ],
)
def test_boundaries_that_do_not_fit_are_refused_before_the_first_layer(
    change: dict[str, Any], says: str
) -> None:
    """BR-169: a longest length on a device is refused, not waited for."""
    model = prepare_model(tiny("llama"), check=True)
    reached: list[int] = []
    model.model.layers[0].register_forward_pre_hook(lambda *_: reached.append(1))
    with pytest.raises(AttentionError, match=says):
        model(**dict(packed(LENGTHS).model_inputs(), **change))
    assert not reached


def test_a_cache_asked_for_is_not_made() -> None:
    """A cache would be of the whole row; the numbers are those without it."""
    model, batch = prepare_model(tiny("llama"), check=True), packed(LENGTHS).model_inputs()
    out = model(**dict(batch, use_cache=True))
    assert out.get("past_key_values") is None and out.get("cache") is None
    assert torch.equal(out.logits, model(**batch).logits)


@pytest.mark.parametrize("family", ["llama", "glm", "cohere", "phi", "gpt_oss"])
def test_rotation_by_the_models_own_code_gives_the_same(family: str) -> None:
    batch = packed(LENGTHS).model_inputs()
    by_kernel = prepare_model(tiny(family), check=True)(**batch).logits
    by_model = prepare_model(tiny(family), check=True, rope=False)(**batch).logits
    torch.testing.assert_close(by_kernel, by_model, **CLOSE)


@pytest.mark.parametrize("rope", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt_oss", "cohere", "glm"])
def test_under_autocast_attention_gets_one_type(family: str, rope: bool) -> None:
    """Rotations and norms of most models give float32 there, where values are in 16 bits."""
    model, batch = prepare_model(tiny(family), check=True, rope=rope), packed(LENGTHS).model_inputs()
    expected = model(**batch).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(**batch).logits
    assert float((found - expected).detach().norm() / expected.detach().norm()) < 0.02


def test_norms_kept_in_float32_do_not_widen_attention() -> None:
    """As trainers of quantized models keep them: in 16 bits but for the norms' weights."""
    model = tiny("qwen3")
    expected = prepare_model(model, check=True)(**packed(LENGTHS).model_inputs()).logits
    restore_model(model).bfloat16()
    for name, parameter in model.named_parameters():
        if "norm" in name and ("q_" in name or "k_" in name):
            parameter.data = parameter.data.float()
    for rope in (True, False):
        found = prepare_model(model, check=False, rope=rope)(**packed(LENGTHS).model_inputs()).logits
        assert float((found - expected).detach().norm() / expected.detach().norm()) < 0.05


def test_attention_dropout_is_refused() -> None:
    with pytest.raises(ModelError, match="attention_dropout=0.0"):
        prepare_model(tiny("llama", attention_dropout=0.1))


SMALL: dict[str, Any] = dict(vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (lambda: transformers.BertModel(transformers.BertConfig(**SMALL)), "no causal attention"),
        (lambda: transformers.BloomModel(transformers.BloomConfig(**SMALL)), "attention interface"),
        (lambda: torch.nn.Linear(2, 2), "no causal attention"),
    ],
    ids=["bert", "bloom", "linear"],
)
def test_models_whose_attention_cannot_be_reached_are_refused(model: Any, says: str) -> None:
    """BR-003, BR-004, BR-005: refused where it is bound, never left to leak."""
    made = model()
    with pytest.raises(ModelError, match=says):
        prepare_model(made)
    assert not any("_padless_changes" in vars(module) for module in made.modules())


@pytest.mark.parametrize("check", [True, "auto", False])
def test_positions_that_are_counted_from_the_padding_id_are_refused(check: bool | str) -> None:
    """BR-016: RoBERTa's sequences begin at pad_token_id + 1, a packed batch's at 0."""
    config = transformers.RobertaConfig(**SMALL, is_decoder=True, intermediate_size=40, pad_token_id=7)
    with pytest.raises(ModelError, match="counts positions from .* .pad_token_id 7.*with padding"):
        prepare_model(transformers.RobertaForCausalLM(config), check=check)


@pytest.mark.parametrize("family", ["OPT", "GPT2"])
def test_learned_positions_begin_anew_with_each_sequence(family: str) -> None:
    """BR-016: OPT adds its offset of 2 itself, so it is taken; the numbers are those of one by one."""
    names = {"OPT": dict(ffn_dim=40, word_embed_proj_dim=32), "GPT2": {}}[family]
    config = getattr(transformers, f"{family}Config")(
        **SMALL, **names, max_position_embeddings=64, dropout=0.0
    )
    torch.manual_seed(0)
    model = getattr(transformers, {"OPT": "OPTForCausalLM", "GPT2": "GPT2LMHeadModel"}[family])(config).eval()
    batch = packed(LENGTHS)
    expected = logits_alone(model, batch)
    prepare_model(model, check=True)
    torch.testing.assert_close(model(**batch.model_inputs()).logits, expected, **CLOSE)


@pytest.mark.parametrize("check", [True, "auto", False])
def test_layers_that_keep_boundaries_to_themselves_are_refused(check: bool | str) -> None:
    """BR-004: attention that never hears of boundaries is told, whoever checks."""
    model = transformers.StableLmForCausalLM(transformers.StableLmConfig(**SMALL, num_key_value_heads=4))
    with pytest.raises(ModelError, match="boundaries did not reach StableLmAttention"):
        prepare_model(model, check=check)(**packed([3, 2]).model_inputs())


@pytest.mark.parametrize("family", [name for name in UNLISTED if name != "llama4"])
def test_families_that_are_not_listed_keep_their_own_rotation_and_are_right(family: str) -> None:
    """BR-005."""
    model, batch = tiny(family), packed(LENGTHS)
    expected = logits_alone(model, batch)
    prepare_model(model, check=True)
    assert not any(turns_by_kernel(module) for module in find_decoder(model).attention)
    torch.testing.assert_close(model(**batch.model_inputs()).logits, expected, **CLOSE)


def test_attention_in_chunks_is_refused() -> None:
    with pytest.raises(ModelError, match="in chunks"):
        prepare_model(tiny("llama4"))


def test_a_model_type_that_nobody_knows_is_right_by_its_code() -> None:
    """BR-005: the family is that of the code that runs, not of a name."""

    class OtherConfig(transformers.LlamaConfig):
        model_type = "unheard_of"

    class Other(transformers.LlamaForCausalLM):
        config_class = OtherConfig

    known = tiny("llama")
    model, batch = Other(OtherConfig(**known.config.to_dict())), packed(LENGTHS)
    model.load_state_dict(known.state_dict())
    prepare_model(model.eval(), check=True)
    torch.testing.assert_close(model(**batch.model_inputs()).logits, logits_alone(known, batch), **CLOSE)


@pytest.mark.parametrize("family", ["qwen3", "cohere2", "gpt_neox"])
def test_packed_steps_compile_without_graph_breaks(family: str) -> None:
    """BR-170."""
    model, batch = prepare_model(tiny(family), check=True), packed(LENGTHS).model_inputs()
    expected, gradients = step(model, lambda: model(**batch).loss)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss, found = step(model, lambda: compiled(**batch).loss)
    torch.testing.assert_close(loss, expected, **CLOSE)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, **CLOSE, msg=name)


@pytest.mark.parametrize("padded", [True, False])
def test_packs_of_one_to_twenty_sequences_compile_a_few_times(padded: bool) -> None:
    """BR-169, BR-172: neither the number of sequences nor the longest makes a program of its own."""
    model = prepare_model(tiny("qwen3"), check=True)
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for sequences in range(1, 21):
        batch = packed([2 + number % 3 for number in range(sequences)])
        if padded:
            batch = pad_batch(batch, tokens=64, sequences=24)
        compiled(**batch.model_inputs())
    assert 1 <= counter.frame_count <= 4


def test_an_attention_or_a_check_that_there_is_not_is_told() -> None:
    with pytest.raises(ModelError, match="'flush'; it is auto, "):
        prepare_model(tiny("llama"), attention="flush")
    for check in ("yes", 1, 0, None):
        with pytest.raises(ModelError, match=f"check is {check!r}"):
            prepare_model(tiny("llama"), check=check)  # type: ignore[arg-type]


def test_weights_are_saved_under_their_own_names() -> None:
    model = tiny("llama")
    names = list(model.state_dict())
    prepare_model(model, check=True)
    assert list(model.state_dict()) == names
    pickle.dumps(model.state_dict())


@pytest.mark.parametrize("save", [pickle.dumps, lambda model: torch.save(model, io.BytesIO())])
def test_a_prepared_model_is_not_pickled_by_half(save: Any) -> None:
    """Functions that were set on modules are pickled by their names, so that they would be lost."""
    model, batch = tiny("llama"), packed(LENGTHS).model_inputs()
    expected = prepare_model(model, check=True)(**batch).logits
    with pytest.raises(ModelError, match="restore_model before and prepare_model after"):
        save(model)
    loaded = pickle.loads(pickle.dumps(restore_model(model)))
    assert torch.equal(prepare_model(loaded, check=True)(**batch).logits, expected)


WRAPPERS: dict[str, Any] = {
    "inner": lambda model: (model.model, model),
    "outer": lambda model: (model, model.model),
    "peft": lambda model: (model, lora(model)),
    "merged": lambda model: (wrapped := lora(model), wrapped.merge_and_unload),
    "compiled": lambda model: (model, torch.compile(model, backend="eager")),
}


def lora(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_model_that_was_prepared_a_level_in_or_out_is_found(wrapper: str) -> None:
    model, batch = tiny("llama"), packed(LENGTHS).model_inputs()
    attention, decoder = model.model.layers[0].self_attn, model.model
    expected = logits_alone(model, packed(LENGTHS))
    prepared, other = WRAPPERS[wrapper](model)
    prepare_model(prepared, check=True)
    other = other if isinstance(other, torch.nn.Module) else other()
    prepare_model(other, attention="sdpa_mask", check=True)
    assert len(decoder._forward_pre_hooks) == 1
    torch.testing.assert_close(model(**batch).logits, expected, **CLOSE)
    restore_model(other)
    assert not decoder._forward_pre_hooks and "forward" not in vars(attention)
    assert not any("_padless_changes" in vars(module) for module in model.modules())


def test_a_model_that_cannot_be_wired_is_left_as_it_was() -> None:
    model = tiny("llama")
    model.model.layers[1].self_attn.forward = lambda *args, **kwargs: None
    attributes = [sorted(vars(module)) for module in model.modules()]
    with pytest.raises(ModelError, match="prepare the model before what replaced it"):
        prepare_model(model)
    assert [sorted(vars(module)) for module in model.modules()] == attributes


def test_a_model_that_computes_with_its_mask_is_told_the_way_out() -> None:
    model = transformers.DogeForCausalLM(transformers.DogeConfig(**SMALL, intermediate_size=40))
    with pytest.raises(IsolationError, match="cannot do without one: train it with padding"):
        prepare_model(model, check=True)
