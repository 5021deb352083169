"""Whether a trainer gives its model what was packed: its own loader and collator, its own loss, a tiny model.

`pack-dataset verify DIR --trainer NAME`: the trainer is made as the README says, on packs from all over
the folder. What its loader yields must be the packs to the token; then the hidden states and the loss of
packed sequences must be those of the same sequences one by one. The model is random and small, in doubles,
and ids are taken modulo its vocabulary: boundaries are looked at, not language.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from padless.runtime.batch import Pack
from padless.runtime.dataset import PackedDataset
from padless.runtime.errors import PadlessError
from padless.runtime.format import IGNORE_INDEX

PACKS_PER_BATCH = 2
"""More than one: that their rows become one row is part of what is looked at."""
LOOKED_AT = 2**20
"""Tokens of packs that go through the loader, about."""
TRIED = 4096
"""Tokens that go through the model at most, of whole sequences: attention of a CPU is quadratic in them."""
TOLERANCE = 1e-5
_VOCABULARY = 997


class ProofError(PadlessError):
    """A trainer would train on something else than what was packed."""


def prove(folder: str | Path, trainer: str, *, plan: str | None = None) -> str:
    """What was looked at, in a sentence. `trainer` is a key of TRAINERS.

    Raises ProofError for a batch or a loss that is not that of the packs, ImportError where the trainer is
    not installed, and what opening the folder raises.
    """
    data = PackedDataset(folder, plan=plan)
    packs = len(data)
    mean = max(1, sum(len(data[number].input_ids) for number in range(min(packs, 16))) // min(packs, 16))
    count = min(packs, max(PACKS_PER_BATCH, LOOKED_AT // mean))
    numbers = np.linspace(0, packs - 1, count).astype(int).tolist()
    with tempfile.TemporaryDirectory() as work:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the trainer to its user, who is not here
            made = TRAINERS[trainer](data, numbers, _model(), work)
        compared = ""
        for step, batch in enumerate(made.get_train_dataloader()):
            chosen = [data[number] for number in numbers[step * PACKS_PER_BATCH :][:PACKS_PER_BATCH]]
            if problem := _problem(batch, chosen):
                raise ProofError(f"{trainer} gives the model another batch than what was packed: {problem}")
            compared = compared or _losses(made, trainer, batch, chosen)
    compared = compared or f"losses not compared, no two sequences lie within {TRIED:,} tokens"
    return f"{count:,} of {packs:,} packs through its loader, boundaries, positions and labels; {compared}"


def _problem(batch: dict[str, Any], packs: Sequence[Pack]) -> str | None:
    """Where a batch differs from the packs behind each other in one row."""
    lengths = np.concatenate([pack.seq_lengths for pack in packs]).astype(np.int64)
    ends = np.append(0, np.cumsum(lengths))
    want: dict[str, Any] = {
        "input_ids": np.concatenate([pack.input_ids for pack in packs])[None],
        "labels": np.concatenate([pack.labels for pack in packs])[None],
        "position_ids": (np.arange(ends[-1]) - np.repeat(ends[:-1], lengths))[None],
    }
    given = {  # what says the same once more, for those kernels that go by it
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": lengths.max(),
        "max_length_k": lengths.max(),
        "seq_idx": np.repeat(np.arange(len(lengths)), lengths)[None],
    }
    if "attention_mask" in batch:
        return "it has an attention_mask, under which sequences of a pack see each other"
    for name, values in {**want, **{name: given[name] for name in given if name in batch}}.items():
        if name not in batch:
            return f"it has no {name}"
        found = np.asarray(batch[name])
        if found.shape != np.shape(values):
            return f"{name} is {list(found.shape)}, the packs are {list(np.shape(values))}"
        if not np.array_equal(found, values):
            first = np.flatnonzero((found != values).reshape(-1))[0]
            there, here = found.reshape(-1)[first], np.reshape(values, -1)[first]
            return f"{name} has {there} at place {first}, the packs have {here}"
    return None


def _losses(trainer: Any, name: str, batch: dict[str, Any], packs: Sequence[Pack]) -> str:
    """Packed and one by one, for the first whole sequences of a batch; nothing where there are not two."""
    lengths = np.concatenate([pack.seq_lengths for pack in packs])
    count = int(np.searchsorted(np.cumsum(lengths), TRIED, side="right"))
    tokens = int(lengths[:count].sum())
    if count < 2 or bool((batch["labels"][0, :tokens] == IGNORE_INDEX).all()):
        return ""
    head: dict[str, Any] = {}
    for key, values in batch.items():
        if key.startswith("cu_seq_lens"):
            head[key] = values[: count + 1]
        else:
            head[key] = values[:, :tokens] if isinstance(values, torch.Tensor) else values
    ids = head["input_ids"] = head["input_ids"] % _VOCABULARY
    labels = torch.where(head["labels"] == IGNORE_INDEX, IGNORE_INDEX, head["labels"] % _VOCABULARY)
    head["labels"] = labels
    model = trainer.model.eval()
    body, states = model.model, []
    hook = body.register_forward_hook(lambda module, args, output: states.append(output.last_hidden_state[0]))
    with torch.no_grad():
        loss = float(trainer.compute_loss(model, dict(head)))
        for one in (*ids.split(lengths[:count].tolist(), dim=1), ids):
            body(input_ids=one, use_cache=False)
        packed, singles, mixed = states[0], torch.cat(states[1:-1]), states[-1]
        logits = model.lm_head(singles[:-1])
    hook.remove()
    expected = float(torch.nn.functional.cross_entropy(logits, labels[0, 1:]))
    apart, far = (float((some - singles).abs().max()) for some in (packed, mixed))
    if not (apart <= TOLERANCE and abs(loss - expected) <= TOLERANCE):
        raise ProofError(
            f"{name}: {count} packed sequences have a loss of {loss:.6f}, one by one {expected:.6f}, and "
            f"their states are up to {apart:.2g} apart: sequences of a pack see each other"
        )
    return (
        f"the loss of {count:,} packed sequences is that of the single ones to {abs(loss - expected):.0e} "
        f"(hidden states to {apart:.0e}; mixed they would be {far:.1g} apart)"
    )


def _model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.2,  # so large that a mixed-up sequence shows
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).double()


def _arguments(work: str) -> dict[str, Any]:
    return {
        "output_dir": work,
        "per_device_train_batch_size": PACKS_PER_BATCH,
        "train_sampling_strategy": "sequential",
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def _hf(data: PackedDataset, numbers: list[int], model: Any, work: str) -> Any:
    from transformers import Trainer, TrainingArguments

    from padless.runtime.trainers.hf import PadlessCollator

    return Trainer(
        model,
        TrainingArguments(**_arguments(work), remove_unused_columns=False),
        train_dataset=torch.utils.data.Subset(data, numbers),
        data_collator=PadlessCollator(),
    )


def _trl(data: PackedDataset, numbers: list[int], model: Any, work: str) -> Any:
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(data.path / "tokenizer", local_files_only=True)
    for name in ("eos_token", "pad_token"):  # TRL asks for them and needs none here
        if getattr(tokenizer, name) is None:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(0))
    return SFTTrainer(
        model=model,
        args=SFTConfig(**_arguments(work), packing=False, padding_free=True, max_length=None),
        train_dataset=data.to_hf().select(numbers),
        processing_class=tokenizer,
    )


TRAINERS: dict[str, Callable[[PackedDataset, list[int], Any, str], Any]] = {"trl": _trl, "hf": _hf}
"""By name: a trainer of that kind over those packs in that order, made as the README says."""
