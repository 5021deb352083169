"""Whether trainers train on what was packed: every example runs, and each of its losses is looked at.

python scripts/prove_trainers.py [NAME...]

While an example runs, its model's forward is watched: the row that a trainer gives is cut at the sequences
that lie in the folder, these go through the same model one by one, and the loss has to be theirs to 1e-5.
Rows go to scripts/results/trainers.jsonl; the README's table is made from them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import runpy
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from bench_results import Results

HERE = Path(__file__).resolve().parent
EXAMPLES = {
    "plain_pytorch": "torch",
    "accelerate_loop": "accelerate",
    "transformers_trainer": "transformers",
    "peft_lora": "peft",
    "trl_sft": "trl",
    "lightning_fit": "lightning",
}
"""A script in examples/ -> the package that it shows."""
TOLERANCE = 1e-5
TEETH = 1e-3
"""How far the loss of a row whose sequences see each other has to be from theirs, or a match says nothing."""


@dataclass
class Watch:
    """What was seen of one run: a number for each forward in training."""

    folder: Path | None = None
    apart: list[float] = field(default_factory=list)
    """|loss of the row - mean loss of its sequences' trained tokens, one by one|."""
    mixed: list[float] = field(default_factory=list)
    """The same of a row without boundaries."""
    sequences: int = 0
    _known: set[tuple[int, ...]] = field(default_factory=set)
    _inside: bool = False

    def sees(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """A hook on the forward of all modules."""
        if self._inside or type(module).__name__ != "LlamaForCausalLM" or not module.training:
            return
        self._inside = True
        try:
            self._compare(module, kwargs["input_ids"], kwargs["labels"], float(output.loss))
        finally:
            self._inside = False

    def _compare(self, model: Any, ids: torch.Tensor, labels: torch.Tensor, loss: float) -> None:
        assert ids.shape[0] == 1, f"a batch of {ids.shape[0]} rows: packs become one row"
        known = self._sequences()
        total, targets, at = 0.0, 0, 0
        with torch.no_grad():
            while at < ids.shape[1]:
                length = next(
                    n for n in known[int(ids[0, at])] if tuple(ids[0, at : at + n].tolist()) in self._known
                )
                one = slice(at, at + length)
                trained = int((labels[0, one] != -100).sum())
                if trained:
                    alone = model(input_ids=ids[:, one], labels=labels[:, one], use_cache=False).loss
                    total, targets = total + float(alone) * trained, targets + trained
                at += length
                self.sequences += 1
            mixed = float(model(input_ids=ids, labels=labels, use_cache=False).loss)
        self.apart.append(abs(loss - total / targets))
        self.mixed.append(abs(mixed - total / targets))

    def _sequences(self) -> dict[int, list[int]]:
        """First token -> the lengths of the folder's sequences that begin with it, longest first."""
        from padless.runtime.reader import PackedReader

        if not self._known:
            assert self.folder is not None
            (folder,) = (self.folder / "packs").iterdir()
            for pack in PackedReader(folder):
                at = 0
                for length in pack.seq_lengths.tolist():
                    self._known.add(tuple(pack.input_ids[at : at + length].tolist()))
                    at += length
        found: dict[int, set[int]] = {}
        for one in self._known:
            found.setdefault(one[0], set()).add(len(one))
        return {token: sorted(lengths, reverse=True) for token, lengths in found.items()}


@contextlib.contextmanager
def watching(folder: Path) -> Iterator[Watch]:
    """Watch all models' forwards; `folder` is the cache that the example packs into."""
    watch = Watch(folder)
    hook = torch.nn.modules.module.register_module_forward_hook(watch.sees, with_kwargs=True)
    before = os.environ.get("PADLESS_CACHE")
    os.environ["PADLESS_CACHE"] = str(folder)
    try:
        yield watch
    finally:
        hook.remove()
        del os.environ["PADLESS_CACHE"]
        if before is not None:
            os.environ["PADLESS_CACHE"] = before


def prove(name: str, folder: Path) -> Watch:
    """Run an example and hold its losses against those of single sequences; AssertionError."""
    sys.path.insert(0, str(HERE / "examples"))
    try:
        with watching(folder) as watch, warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            runpy.run_path(str(HERE / "examples" / f"{name}.py"))
    finally:
        sys.path.remove(str(HERE / "examples"))
    assert len(watch.apart) > 1, "the example trained nothing that could be watched"
    assert min(watch.mixed) > TEETH, "this model would not show it if sequences were mixed"
    assert max(watch.apart) <= TOLERANCE, f"{name}: losses are {max(watch.apart):.2g} apart"
    return watch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=[*EXAMPLES], metavar="NAME", help=", ".join(EXAMPLES))
    parser.add_argument("--results", type=Path, default=HERE / "results" / "trainers.jsonl")
    options = parser.parse_args()
    results = Results(bench="trainers", path=options.results)
    for name in options.names:
        with tempfile.TemporaryDirectory() as folder:
            watch = prove(name, Path(folder))
        case = f"{EXAMPLES[name]} {version(EXAMPLES[name])}"
        results.add(case, name, "steps", len(watch.apart), "count")
        results.add(case, name, "sequences", watch.sequences, "count")
        results.add(case, name, "loss_apart", max(watch.apart) * 1e6, "1e-6 nats")
        results.add(case, name, "loss_apart_mixed", min(watch.mixed), "nats")


if __name__ == "__main__":
    main()
