"""transformers' Trainer, with PadlessCollator; the batch size counts packs."""

from __future__ import annotations

import tempfile

from demo import demo_model, demo_packs
from transformers import Trainer, TrainingArguments

from padless.runtime.trainers.hf import PadlessCollator

with tempfile.TemporaryDirectory() as output:
    Trainer(
        demo_model(),
        TrainingArguments(
            output_dir=output,
            per_device_train_batch_size=2,
            remove_unused_columns=False,  # Trainer would take the boundaries for such
            max_steps=3,
            logging_steps=1,
            learning_rate=1e-3,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
        ),
        train_dataset=demo_packs(),
        data_collator=PadlessCollator(),
    ).train()
