"""Conversations about images, packed and trained on: python scripts/examples/vision_language.py

On the command line: pack-dataset build rows.jsonl --tokenizer qwen2.5-vl/ --max-length 8192 --output packed
"""

import json
import tempfile
from pathlib import Path

import torch
from PIL import Image
from tiny import TOKENIZER
from tokenizers import AddedToken, Tokenizer
from transformers import AutoImageProcessor, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from padless.packer import PackConfig, pack_dataset
from padless.runtime.models import prepare_model
from padless.runtime.pixels import with_pixels
from padless.runtime.stream import PackedStream

VISION = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROCESSOR = {
    **{"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2},
    **{"temporal_patch_size": 2, "min_pixels": 4 * 28 * 28, "max_pixels": 64 * 28 * 28},
}
COLOURS = {"red": (200, 30, 30), "green": (30, 180, 30), "blue": (40, 40, 200)}


def vision_folder(folder: Path) -> Path:
    """What a vision-language model's folder has of tokenizer and processor; take your model's instead."""
    folder.mkdir()
    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in VISION])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((TOKENIZER / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


def records(folder: Path) -> list[dict]:
    """Pictures of one colour and a question about each; every fourth record has none."""
    rows = []
    for number in range(48):
        name, colour = list(COLOURS.items())[number % 3]
        question, images = "Which colour?", []
        if number % 4:
            images = [f"{number}.png"]
            Image.new("RGB", (60 + 5 * number, 90), colour).save(folder / images[0])
            question = "<image>" + question
        answer = f"It is {name}." if images else "I see no image."
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append({"messages": turns, "images": images})
    return rows


def tiny_model(folder: Path):
    """A random Qwen2.5-VL, prepared for packed batches; put your own model here."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": tokenizer.get_vocab_size(), "pad_token_id": None}
    sizes |= {"bos_token_id": None, "eos_token_id": None}
    sizes |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
    names = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
    ids = {name: tokenizer.token_to_id(text) for name, text in zip(names, VISION, strict=True)}
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(text_config=sizes, vision_config=vision, **ids)
    return prepare_model(Qwen2_5_VLForConditionalGeneration(config))


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = vision_folder(folder / "qwen2.5-vl")
        source = folder / "rows.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in records(folder)))
        pack_dataset(
            PackConfig(
                sources=(str(source),),
                tokenizer=str(tokenizer),
                max_length=512,
                output=str(folder / "packed"),
                workers=1,
            )
        )
        model = tiny_model(tokenizer)
        processor = AutoImageProcessor.from_pretrained(folder / "packed" / "tokenizer")
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        stream = PackedStream(folder / "packed")
        for epoch in range(6):
            total = targets = images = 0
            for batch in stream:
                batch = with_pixels(batch, processor, root=str(folder))
                loss = model(**batch.model_inputs()).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                total += loss.item() * batch.num_targets
                targets, images = targets + batch.num_targets, images + len(batch["images"])
            print(f"epoch {epoch}: loss {total / targets:.4f} over {images} images")


if __name__ == "__main__":
    main()
