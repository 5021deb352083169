"""A model with short convolutions (LFM2) on packs, or one by one: python scripts/examples/hybrid.py

Convolutions and recurrent states run on from one sequence into the next unless their kernel is told where
each begins (causal-conv1d, mamba-ssm, flash-linear-attention, on a GPU). Without such a kernel the model is
refused; the same folder then gives one sequence at a time, by a plan of a few bytes, still without padding.
On the command line: pack-dataset repack packed --plan-only single --strategy none
"""

import tempfile
from pathlib import Path

import torch
from dpo import ROWS
from tiny import packed
from transformers import Lfm2Config, Lfm2ForCausalLM

from padless.packer.repack_config import RepackConfig
from padless.packer.repack_plan import plan_only
from padless.runtime.errors import IsolationError
from padless.runtime.loss import step_targets
from padless.runtime.models import prepare_model
from padless.runtime.stream import PackedStream

SEQUENCES_PER_STEP = 8


def hybrid_model():
    """A random LFM2; put your own model here."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    layers = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    return Lfm2ForCausalLM(Lfm2Config(vocab_size=2112, pad_token_id=0, **sizes, **layers))


def main() -> None:
    rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in ROWS[:16]]
    with tempfile.TemporaryDirectory() as scratch:
        folder = packed(Path(scratch), rows)
        model, plan, packs = hybrid_model(), None, 1
        try:
            prepare_model(model, check=True)
        except IsolationError as reason:
            print(f"one sequence at a time: {reason}")
            model, plan, packs = hybrid_model(), "single", SEQUENCES_PER_STEP
            plan_only(RepackConfig(folders=(str(folder),), output="", strategy="none"), plan)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        stream = PackedStream(folder, plan=plan)
        for epoch in range(4):
            stream.set_epoch(epoch)
            batches, total, trained = [*stream], 0.0, 0
            for step in range(0, len(batches), packs):
                targets = step_targets(batches[step : step + packs])
                for batch in batches[step : step + packs]:
                    inputs = batch.model_inputs()
                    if plan:  # a row that is one sequence needs no boundaries
                        inputs = {name: inputs[name] for name in ("input_ids", "labels", "use_cache")}
                    loss = model(**inputs, num_items_in_batch=targets).loss
                    loss.backward()
                    total += float(loss.detach()) * targets
                trained += targets
                optimizer.step()
                optimizer.zero_grad()
            print(f"epoch {epoch}: loss {total / trained:.4f} over {trained} tokens")


if __name__ == "__main__":
    main()
