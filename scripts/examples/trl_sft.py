"""TRL's SFTTrainer takes the packs with no code of ours: packing off (they are packed), padding-free on."""

from __future__ import annotations

import tempfile

from demo import TOKENIZER, demo_model, demo_packs
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

with tempfile.TemporaryDirectory() as output:
    SFTTrainer(
        demo_model(),
        args=SFTConfig(
            output_dir=output,
            packing=False,  # True would pack the packs again, as if each were one document
            padding_free=True,
            max_length=None,
            per_device_train_batch_size=2,
            max_steps=3,
            logging_steps=1,
            learning_rate=1e-3,
            bf16=False,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
        ),
        train_dataset=demo_packs().to_hf(),
        processing_class=AutoTokenizer.from_pretrained(TOKENIZER),
    ).train()
