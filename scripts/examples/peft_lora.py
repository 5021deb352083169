"""LoRA: PEFT's model in transformers' Trainer, with PadlessCollator."""

from __future__ import annotations

import tempfile

from demo import demo_model, demo_packs
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments

from padless.runtime.trainers.hf import PadlessCollator

lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
model = get_peft_model(demo_model(), lora)
model.print_trainable_parameters()
with tempfile.TemporaryDirectory() as output:
    Trainer(
        model,
        TrainingArguments(
            output_dir=output,
            per_device_train_batch_size=2,
            remove_unused_columns=False,
            max_steps=3,
            logging_steps=1,
            learning_rate=1e-2,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
        ),
        train_dataset=demo_packs(),
        data_collator=PadlessCollator(),
    ).train()
