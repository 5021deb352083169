"""The other side of "packed equals unpacked": sequences one at a time through a tiny model, spelled out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from padless.runtime.collate import collate
from padless.runtime.format import ColumnInfo
from padless.runtime.varlen_batch import VarlenBatch

VOCAB = 40


def tiny_model(seed: int = 0, vocab: int = VOCAB, attention: str | None = None) -> LlamaForCausalLM:
    """A random Llama in fp32, its weights so large that a mixed-up sequence shows in the loss."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config)


def batch_of(
    sequences: Sequence[tuple[list[int], int]],
    *,
    token: Mapping[str, list[list[float]]] | None = None,
    sequence: Mapping[str, Sequence[float]] | None = None,
) -> VarlenBatch:
    """One pack of (ids, tokens of the prompt), the rest trained; further columns by level, one entry each."""
    prompts = [max(prompt, 1) for _, prompt in sequences]
    row: dict[str, Any] = {
        "input_ids": [token for ids, _ in sequences for token in ids],
        "labels": [
            token if place >= prompt else -100
            for (ids, _), prompt in zip(sequences, prompts, strict=True)
            for place, token in enumerate(ids)
        ],
        "seq_lengths": [len(ids) for ids, _ in sequences],
        "sequence_ids": [*range(len(sequences))],
    }
    columns = []
    for name, lists in (token or {}).items():
        row[name] = torch.tensor([value for one in lists for value in one])
        columns.append(ColumnInfo(name=name, level="token", type="list<float32>"))
    for name, values in (sequence or {}).items():
        row[name] = torch.tensor(values)
        columns.append(ColumnInfo(name=name, level="sequence", type="list<float32>"))
    return collate([row], columns=columns)


def random_sequences(lengths: Sequence[int], prompts: Sequence[int]) -> list[tuple[list[int], int]]:
    """Sequences of random tokens, the same for the same lengths."""
    made = torch.Generator().manual_seed(sum(lengths))
    ids = [torch.randint(VOCAB, (length,), generator=made).tolist() for length in lengths]
    return list(zip(ids, prompts, strict=True))


def logits_of(model: Any, batch: VarlenBatch) -> torch.Tensor:
    """The model's logits of a packed batch."""
    logits: torch.Tensor = model(**{**batch.model_inputs(), "labels": None}).logits
    return logits


def alone(model: Any, ids: list[int], prompt: int) -> torch.Tensor:
    """log p of each answer token, the sequence alone in its row: [len(ids) - max(prompt, 1)]."""
    logps = model(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)
    answer = range(max(prompt, 1), len(ids))
    return torch.stack([logps[place - 1, ids[place]] for place in answer]) if answer else logps[:0, 0]


def gradients(model: Any, loss: torch.Tensor) -> list[torch.Tensor]:
    """The gradient of each parameter."""
    model.zero_grad()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def assert_same_training(
    model: Any, packed: Callable[[], torch.Tensor], unpacked: Callable[[], torch.Tensor]
) -> None:
    """Two ways to one loss, and to the gradients of all parameters, to 1e-5."""
    ways = []
    for way in (packed, unpacked):
        loss = way()
        ways.append((loss.detach(), gradients(model, loss)))
    (one, ones), (other, others) = ways
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert any(float(grad.abs().max()) > 1e-3 for grad in others)
    for mine, theirs in zip(ones, others, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)
