"""Fill in the middle: documents rearranged, so that a model learns to write what stands between two parts.

A document is cut at two characters drawn at random, and its parts are written so that the middle comes last:

    PSM:  <prefix> first part  <suffix> last part  <middle> middle part
    SPM:  <prefix> <suffix> last part  <middle> first part, middle part

(Bavarian et al., Efficient Training of Language Models to Fill in the Middle, 2022: cuts at characters, whole
documents, SPM in its second variant; all tokens are trained.) What is drawn follows from the document's text
and the seed alone, so no chunk, worker, order or neighbour changes it. Parts are encoded apart, as they are
when a model is asked to fill a gap; so the tokenizer must spell texts byte by byte.

A document is rearranged before anything is known of packs: `--overflow split` and `--strategy wrapped` may
cut it anywhere, and `truncate`, which would always cut off the middle, is refused.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from padless.packer.config import PackConfig
from padless.packer.encode import byte_lengths
from padless.packer.errors import InputError
from padless.packer.spans import Spanned
from padless.packer.tokenizer_files import TokenizerFiles

KNOWN = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
)
"""Tokens before the first part, the last part and the middle, as tokenizers name them."""

PLAIN, PREFIX, SUFFIX, MIDDLE, BOTH = range(5)
"""What stands before a piece: nothing, one token, or PREFIX and SUFFIX."""


class Fim(NamedTuple):
    """How documents are rearranged; everything in it decides the bytes."""

    rate: float
    """Share of the documents."""
    spm_rate: float
    """Share of those that are in the order SPM."""
    seed: int
    tokens: tuple[str, str, str]
    ids: tuple[int, int, int]

    @classmethod
    def of(cls, config: PackConfig, tokenizer: TokenizerFiles, end_id: int | None) -> Fim | None:
        """None where no rate is asked for. InputError where the tokenizer cannot do it."""
        if not config.fim_rate:
            return None
        where = f"the tokenizer in {config.tokenizer}"
        candidates: tuple[tuple[str, ...], ...] = KNOWN
        if config.fim_tokens is not None:
            candidates = (tuple(config.fim_tokens.split(",")),)
            missing = [text for text in candidates[0] if tokenizer.token_id(text) is None]
            if missing:
                raise InputError(f"--fim-tokens: {missing[0]!r} is no token of {where}; name ones that are")
        ids = (tuple(map(tokenizer.token_id, names)) for names in candidates)
        found = [pair for pair in zip(candidates, ids, strict=True) if None not in pair[1]]
        if not found:
            raise InputError(
                f"--fim-rate {config.fim_rate:g}: {where} has no tokens for filling in the middle (as "
                f"{', '.join(KNOWN[0])}): name its own with --fim-tokens PREFIX,SUFFIX,MIDDLE, or leave "
                "--fim-rate out"
            )
        if end_id is None:
            raise InputError(
                f"--fim-rate {config.fim_rate:g} needs an end token, or the model never learns where a "
                "middle stops: give --eos TOKEN"
            )
        if byte_lengths(tokenizer) is None:
            raise InputError(
                f"--fim-rate {config.fim_rate:g}: {where} does not spell texts byte by byte, so parts "
                "encoded apart are not the document (a space is put before each): use a byte-level "
                "tokenizer, or leave --fim-rate out"
            )
        return cls(config.fim_rate, config.fim_spm_rate, config.seed, *found[0])  # type: ignore[arg-type]

    def cut(self, texts: list[str]) -> tuple[list[str], NDArray[np.int8]]:
        """The texts in pieces, in the order in which they are to stand, and what goes before each piece.

        A text is one piece that is PLAIN, or three. One that spells a token of ours is never cut.
        """
        pieces: list[str] = []
        before: list[int] = []
        for text in texts:
            drawn = random.Random(xxhash.xxh3_64_intdigest(text.encode("utf-8"), seed=self.seed))
            rate, order, *cuts = (drawn.random() for _ in range(4))
            if rate >= self.rate or any(token in text for token in self.tokens):
                pieces.append(text)
                before.append(PLAIN)
                continue
            start, end = sorted(int(cut * (len(text) + 1)) for cut in cuts)
            first, middle, last = text[:start], text[start:end], text[end:]
            if order < self.spm_rate:
                pieces += (last, first, middle)
                before += (BOTH, MIDDLE, PLAIN)
            else:
                pieces += (first, last, middle)
                before += (PREFIX, SUFFIX, MIDDLE)
        return pieces, np.array(before, dtype=np.int8)

    def put_together(self, spanned: Spanned, before: NDArray[np.int8]) -> Spanned:
        """One text of tokens for each document, out of its encoded pieces and the tokens before them."""
        lengths = np.diff(spanned.offsets)
        added = np.array([0, 1, 1, 1, 2])[before]
        places = np.zeros(len(before) + 1, dtype=np.int64)
        np.cumsum(lengths + added, out=places[1:])
        ids = np.empty(int(places[-1]), dtype=np.int32)
        is_text = np.ones(len(ids), dtype=np.bool_)
        prefix, suffix, middle = self.ids
        at = places[:-1]
        for what, token in ((PREFIX, prefix), (SUFFIX, suffix), (MIDDLE, middle), (BOTH, prefix)):
            here = at[before == what]
            ids[here], is_text[here] = token, False
        here = at[before == BOTH] + 1
        ids[here], is_text[here] = suffix, False
        ids[is_text] = spanned.ids
        # The piece after one of MIDDLE in the order SPM is the only PLAIN one that begins no document.
        begins = (before == PREFIX) | (before == BOTH) | (before == PLAIN)
        begins[2:] &= before[:-2] != BOTH
        starts = at[begins]
        offsets = np.append(starts, places[-1])
        return Spanned(ids, offsets, np.arange(len(starts)), offsets[:-1], offsets[1:])
