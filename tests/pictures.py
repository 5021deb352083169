"""What tests of images share: a word-level vision tokenizer, generated pictures, tiny models for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer
from toys import word_tokenizer

VISION_START, IMAGE_PAD, VISION_END, VIDEO_PAD = range(100, 104)
VOCABULARY = 104

CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""In the form of Qwen2.5-VL's own template."""

QWEN25: dict[str, Any] = {
    **{"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2},
    **{"temporal_patch_size": 2, "min_pixels": 4 * 28 * 28, "max_pixels": 24 * 28 * 28},
}
"""preprocessor_config.json of Qwen2.5-VL, for small pictures: 4 to 24 tokens of 28 x 28 pixels."""
QWEN3: dict[str, Any] = {
    **{"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16, "merge_size": 2},
    **{"temporal_patch_size": 2, "size": {"shortest_edge": 4 * 32 * 32, "longest_edge": 24 * 32 * 32}},
}
"""The same of Qwen3-VL, under the newer names: 32 x 32 pixels a token."""
GLM: dict[str, Any] = {
    **{"image_processor_type": "Glm4vImageProcessor", "patch_size": 14, "merge_size": 2},
    **{"temporal_patch_size": 2, "size": {"shortest_edge": 8 * 28 * 28, "longest_edge": 48 * 28 * 28}},
}
"""The same of GLM-4.1V, which counts an image's pixels twice."""
TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
TOKENS_OF_GLM = ("<|begin_of_image|>", "<|image|>", "<|end_of_image|>", "<|video|>")


def vision_tokenizer(
    folder: Path, *, processor: dict[str, Any] | None = QWEN25, template: str | None = CHAT
) -> Path:
    """`toys.word_tokenizer` with the placeholders of images, and the processor's file."""
    if template is not None and processor == GLM:
        for name, of_glm in zip(TOKENS, TOKENS_OF_GLM, strict=True):
            template = template.replace(name, of_glm)
    word_tokenizer(folder, template=template)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    names = TOKENS_OF_GLM if processor == GLM else TOKENS
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    tokenizer.save(str(folder / "tokenizer.json"))
    if processor is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def picture(path: Path, width: int, height: int, **save: Any) -> str:
    """A picture of noise, the same for the same size; its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng([width, height]).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, **save)
    return path.name


def pictures(folder: Path, *sizes: tuple[int, int]) -> list[str]:
    """Pictures of these widths and heights; their names."""
    return [picture(folder / f"{n}.png", *size) for n, size in enumerate(sizes)]


def image_processor(config: dict[str, Any]) -> Any:
    """transformers' own image processor, on Pillow."""
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    of_family = Glm4vImageProcessorPil if config == GLM else Qwen2VLImageProcessorPil
    return of_family(**{k: v for k, v in config.items() if k != "image_processor_type"})


def asks(*contents: Any, **more: Any) -> dict[str, Any]:
    """A record of turns of user and assistant, one after the other, contents as they are given."""
    roles = ("user", "assistant")
    turns = [{"role": roles[number % 2], "content": content} for number, content in enumerate(contents)]
    return {"messages": turns, **more}


def parts(*items: str | dict[str, Any]) -> list[dict[str, Any]]:
    """Content parts: a text for a text, else as given."""
    return [{"type": "text", "text": one} if isinstance(one, str) else one for one in items]


_TEXT: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2},
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1]},
}
_VISION: dict[str, Any] = {
    **{"depth": 2, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "out_hidden_size": 32},
    **{"spatial_merge_size": 2, "temporal_patch_size": 2, "initializer_range": 0.2},
}
_IDS = {
    "image_token_id": IMAGE_PAD,
    "video_token_id": VIDEO_PAD,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}


def qwen25_vl(seed: int = 0) -> Any:
    """A tiny random Qwen2.5-VL, one of its two vision layers in windows."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = {**_VISION, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}
    torch.manual_seed(seed)
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=_TEXT, vision_config=vision, **_IDS)
    )


def qwen3_vl(seed: int = 0) -> Any:
    """A tiny random Qwen3-VL with features of one vision layer added in the decoder's first."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    vision = {**_VISION, "patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    torch.manual_seed(seed)
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=_TEXT, vision_config=vision, **_IDS))


def qwen2_vl(seed: int = 0) -> Any:
    """A tiny random Qwen2-VL."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    vision = {**_VISION, "embed_dim": 32, "mlp_ratio": 1, "patch_size": 14}
    torch.manual_seed(seed)
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=_TEXT, vision_config=vision, **_IDS))


def qwen3_vl_moe(seed: int = 0) -> Any:
    """A tiny random Qwen3-VL with experts."""
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    vision = {**_VISION, "patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    text = {**_TEXT, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    torch.manual_seed(seed)
    return Qwen3VLMoeForConditionalGeneration(
        Qwen3VLMoeConfig(text_config=text, vision_config=vision, **_IDS)
    )


def glm4v(seed: int = 0) -> Any:
    """A tiny random GLM-4.1V."""
    from transformers import Glm4vConfig, Glm4vForConditionalGeneration

    text = {**_TEXT, "rope_parameters": {**_TEXT["rope_parameters"], "partial_rotary_factor": 1.0}}
    vision = {**_VISION, "patch_size": 14, "image_size": 112}
    names = ("image_start", "image", "image_end", "video", "video_start", "video_end")
    ids = {f"{name}_token_id": VISION_START + place for place, name in enumerate(names)}
    torch.manual_seed(seed)
    return Glm4vForConditionalGeneration(Glm4vConfig(text_config=text, vision_config=vision, **ids))


MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen2_vl": (qwen2_vl, QWEN25),
    "qwen2_5_vl": (qwen25_vl, QWEN25),
    "qwen3_vl": (qwen3_vl, QWEN3),
    "qwen3_vl_moe": (qwen3_vl_moe, QWEN3),
    "glm4v": (glm4v, GLM),
}
"""Family -> how to make its model, and its processor."""
OWN_ROTATION = {"glm4v"}
"""Families that keep their own rotation where they are prepared."""


def token_types(ids: Sequence[int]) -> torch.Tensor:
    """What transformers calls mm_token_type_ids: [1, T], 1 at images."""
    return (torch.tensor([list(ids)]) == IMAGE_PAD).int()
