"""The batch that padding-free models take, and its way to a device.

What moves is first gathered into one buffer: that costs a copy in host memory (page-locked where
asked, so that the transfer runs beside the CPU) and makes one transfer of seven. The tensors on the
other side are views of the one that arrived.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from padless.runtime.errors import CollateError
from padless.runtime.images import IMAGES
from padless.runtime.targets import Targets, count_targets, remember_targets

MODEL_INPUTS = (
    "input_ids",
    "labels",
    "position_ids",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "seq_idx",
)
"""The keys of a batch that a model's forward takes, as transformers names them."""
IMAGE_INPUTS = ("image_grid_thw", "pixel_values")
"""Those of a batch with images, once it has their pixels."""
MAX_TARGETS = "max_targets"
"""How many labels are trained at most in every batch that `pad_batch` gives one shape, where it was told."""
_ALIGNMENT = 16


class VarlenBatch(dict[str, Any]):
    """Sequences behind each other in one row: T tokens, N sequences.

    `input_ids, labels, position_ids` [1, T] int64; `seq_idx` [1, T] int32; `cu_seq_lens_q` and
    `cu_seq_lens_k` [N + 1] int32; `max_length_q, max_length_k, num_targets` int; `sequence_ids`
    [N] int64; extras at token level [1, T, ...], at sequence level [N], at pack level [packs].

    Of a folder with images, of which the batch has I: `position_ids` [4, 1, T], of the text, time, height and
    width; `num_images` [N] int32; `image_grid_thw` [I, 3] int64; `images`, a list of I paths and URLs. Pixels
    come with `padless.runtime.pixels.with_pixels`.
    """

    @property
    def num_targets(self) -> int:
        """How many labels are trained: what a loss summed over tokens is divided by."""
        return int(self["num_targets"])

    def model_inputs(self) -> dict[str, Any]:
        """What `model(**inputs)` takes: no extras, no numbers of ours; and no cache.

        With a cache, which is their default outside Trainer, transformers' models look for no
        boundaries under sdpa and eager attention, and attend across all sequences.

        Raises CollateError for a batch of images without their pixels: a model would take the placeholders
        for text, and say nothing.
        """
        if self.get(IMAGES) and "pixel_values" not in self:
            raise CollateError(
                f"the batch has {len(self[IMAGES]):,} images and no pixels, so a model would see "
                "placeholders alone: batch = with_pixels(batch, processor) of padless.runtime.pixels"
            )
        names = MODEL_INPUTS + IMAGE_INPUTS if "pixel_values" in self else MODEL_INPUTS
        return {key: self[key] for key in names} | {"use_cache": False}

    def pin_memory(self) -> VarlenBatch:
        """The same batch in one page-locked buffer, from which copies can run beside the CPU."""
        tensors = self._tensors()
        return self._over(_gather(tensors, pin=True), tensors)

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> VarlenBatch:
        """The batch on a device, in one copy; itself where it is there already."""
        target = torch.empty(0, device=device).device
        tensors = self._tensors()
        if all(tensor.device == target for tensor in tensors.values()):
            return self
        buffer = _shared_buffer(tensors)
        if buffer is None:
            buffer = _gather(tensors, pin=False)
        moved = self._over(buffer.to(target, non_blocking=non_blocking), tensors)
        bounds, labels = tensors.get("cu_seq_lens_q"), tensors.get("labels")
        if bounds is not None and bounds.device.type == "cpu":
            from padless.runtime.attention.boundaries import copied_from  # heavy, and for devices alone

            copied_from(moved["cu_seq_lens_q"], bounds)
        if labels is not None and labels.device.type == "cpu":
            # Counted, not `num_targets`: labels may have been masked since.
            targets = Targets(count_targets(labels), self.get(MAX_TARGETS))
            remember_targets(moved["labels"], targets)
        return moved

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {key: value for key, value in self.items() if isinstance(value, torch.Tensor)}

    def _over(self, buffer: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> VarlenBatch:
        """This batch with its tensors as views of a gathered buffer."""
        moved = dict(self)
        for key, (tensor, start) in _places(tensors).items():
            size = tensor.numel() * tensor.element_size()
            moved[key] = buffer[start : start + size].view(tensor.dtype).view(tensor.shape)
        if "cu_seq_lens_q" in tensors and tensors.get("cu_seq_lens_k") is tensors["cu_seq_lens_q"]:
            moved["cu_seq_lens_k"] = moved["cu_seq_lens_q"]
        return VarlenBatch(moved)


def _places(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, int]]:
    """Where each tensor begins in a buffer that holds all of them, in bytes."""
    places: dict[str, tuple[torch.Tensor, int]] = {}
    end = 0
    for key, tensor in tensors.items():
        if key == "cu_seq_lens_k" and tensor is tensors.get("cu_seq_lens_q"):
            continue
        places[key] = (tensor, end)
        size = tensor.numel() * tensor.element_size()
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return places


def _gather(tensors: Mapping[str, torch.Tensor], *, pin: bool) -> torch.Tensor:
    """All tensors in one buffer of bytes: [bytes] uint8."""
    places = _places(tensors)
    last, start = next(reversed(places.values()))
    buffer = torch.empty(start + last.numel() * last.element_size(), dtype=torch.uint8, pin_memory=pin)
    for tensor, start in places.values():
        size = tensor.numel() * tensor.element_size()
        buffer[start : start + size].view(tensor.dtype).copy_(tensor.reshape(-1))
    return buffer


def _shared_buffer(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """The buffer that all tensors lie in at their places, where one does (after `pin_memory`)."""
    places = _places(tensors)
    first, _ = next(iter(places.values()))
    storage = first.untyped_storage()
    for tensor, start in places.values():
        shares = tensor.untyped_storage().data_ptr() == storage.data_ptr()
        if not (shares and tensor.data_ptr() == storage.data_ptr() + start and tensor.is_contiguous()):
            return None
    return torch.empty(0, dtype=torch.uint8, device=first.device).set_(storage)
