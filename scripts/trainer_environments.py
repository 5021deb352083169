"""Runs the tests that need a trainer's own library, in an environment that has this library alone.

scripts/test-trainers [NAME...] [--environments FOLDER] [--results FILE]

Trainers pin what others pin otherwise (transformers, datasets, numpy), so each has a virtual environment
below `.venv-trainers/`, made once. uv makes them, in half a minute where pip takes five, and they share
files. torch comes first and alone, at the version of `constraints.txt`: a trainer's own requirement would
draw the build for GPUs. Where a trainer asks for far more than reading data needs (servers, clouds,
compilers), it is installed without its requirements, beside those that its reader imports. Only rows of
runs in which every test passed go to the results.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV = "uv==0.13.9"
BASE = ("pytest", "hypothesis", "datasets", "transformers", "accelerate")
"""What the tests of every trainer need beside padless."""
PINNED = frozenset({*BASE, "torch", "numpy", "pyarrow", "tokenizers", "fastokens"})
"""Taken at the version of constraints.txt unless a trainer names another; they contradict the rest of it."""


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """A library, and what an environment with it holds; versions that are not here are constraints.txt's."""

    needs: tuple[str, ...] = ()
    """Requirements, resolved together with padless; bounds let go of the version in constraints.txt."""
    bare: tuple[str, ...] = ()
    """Requirements that are installed without theirs."""
    bare_python: str | None = None
    """The Python that `bare` asks for where it asks for a newer one than its readers need."""
    tests: tuple[str, ...]
    """Modules in tests/."""


TRAINERS: Mapping[str, Trainer] = {
    "mds": Trainer(
        needs=(
            *("brotli", "python-snappy", "zstd", "catalogue", "tqdm", "torchvision==0.28.0", "numpy<2.5"),
            *("boto3",),
        ),
        bare=("mosaicml-streaming==0.13.0",),
        tests=("test_trainers_mds",),
    ),
    "megatron": Trainer(needs=("megatron-core==0.16.1",), tests=("test_trainers_megatron",)),
    "olmo-core": Trainer(needs=("ai2-olmo-core==3.0.0",), tests=("test_trainers_olmo_core",)),
    "llamafactory": Trainer(
        needs=(
            *("transformers==5.6.0", "tokenizers>=0.22", "huggingface_hub>=1.3", "datasets==4.0.0"),
            *("accelerate==1.11.0", "peft==0.18.1", "trl==0.24.0", "einops", "omegaconf", "scipy"),
            *("tyro<0.9", "matplotlib", "sse-starlette", "fire", "hf-transfer", "av<=16", "pillow"),
            *("torchdata==0.11.0", "sentencepiece", "protobuf", "tiktoken"),
        ),
        bare=("llamafactory==0.9.5",),
        tests=("test_trainers_llamafactory",),
    ),
    "axolotl": Trainer(
        needs=(
            *("transformers==5.16.1", "tokenizers==0.23.1", "huggingface_hub==1.17.0", "datasets==4.8.4"),
            *("accelerate==1.13.0", "peft==0.20.0", "trl==1.9.0", "pydantic==2.12.5"),
            *("typing-extensions==4.15.0", "packaging==26.0", "typer==0.25.1", "numpy>=2.1"),
            *("addict", "fire", "einops", "colorama", "scipy", "art", "python-dotenv==1.0.1"),
            *("posthog==6.7.11", "fastcore", "langdetect==1.0.9", "immutabledict==4.2.0", "sentencepiece"),
            *("schedulefree==1.4.1", "requests", "tensorboard", "evaluate==0.4.1", "triton==3.9.0", "wandb"),
            *("PyYAML==6.0.3", "mistral-common==1.11.5", "zstandard==0.22.0", "kernels<0.17,>=0.16"),
            *("axolotl-contribs-mit==0.0.6", "axolotl-contribs-lgpl==0.0.7", "nvidia-ml-py==12.560.30"),
        ),
        bare=("axolotl==0.19.0", "bitsandbytes==0.50.2", "torchao==0.17.0"),
        tests=("test_trainers_axolotl",),
    ),
    "litdata": Trainer(
        needs=("lightning-utilities", "filelock", "requests", "boto3", "tifffile", "obstore", "polars"),
        bare=("litdata==0.2.76",),
        tests=("test_trainers_litdata",),
    ),
    "grain": Trainer(needs=("grain==0.2.18",), tests=("test_trainers_grain",)),
    "torchtitan": Trainer(
        needs=(
            *("datasets<4.8,>=3.6", "torchdata==0.11.0", "tyro", "einops", "spmd_types==0.2.3", "pillow"),
            *("torch_checkpointing>=0.1", "tensorboard", "triton==3.9.0"),
        ),
        bare=("torchtitan==0.3.0",),
        tests=("test_trainers_torchtitan",),
    ),
    "torchtune": Trainer(
        needs=(
            *("torchao==0.17.0", "torchdata==0.11.0", "omegaconf", "tiktoken", "sentencepiece", "blobfile"),
            *("kagglehub", "pillow", "psutil"),
        ),
        bare=("torchtune==0.6.1",),
        tests=("test_trainers_torchtune",),
    ),
    "nemo": Trainer(
        needs=("triton==3.9.0",),
        bare=("megatron-bridge==0.6.2", "megatron-core==0.19.2"),
        bare_python="3.12",
        tests=("test_trainers_nemo",),
    ),
    "automodel": Trainer(bare=("nemo-automodel==0.7.0",), tests=("test_trainers_automodel",)),
    "trl": Trainer(needs=("trl==1.16.0",), tests=("test_trl",)),
    "unsloth": Trainer(
        needs=("trl==1.16.0", "triton==3.9.0"),
        bare=("unsloth==2026.10.9", "unsloth_zoo==2026.10.9"),
        tests=("test_trainers_unsloth",),
    ),
    "trl-current": Trainer(needs=("trl>=1.16", "transformers>=5", "accelerate>=1"), tests=("test_trl",)),
}


def constraints(trainer: Trainer) -> str:
    """The lines of constraints.txt that hold for a trainer."""
    wanted = PINNED - {_name(requirement) for requirement in trainer.needs if "=" in requirement}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return "\n".join(line for line in lines if _name(line) in wanted) + "\n"


def _name(requirement: str) -> str:
    return re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def make(name: str, folder: Path) -> Path:
    """The interpreter of the environment, made where it is missing or was made of other requirements."""
    trainer = TRAINERS[name]
    python, stamp = folder / "bin" / "python", folder / "padless-installed"
    wanted = f"{ROOT} {sys.version}\n{trainer}\n{constraints(trainer)}"
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"{name}: installing into {folder} (once, may take minutes)", file=sys.stderr, flush=True)
    uv = _uv(folder.parent)
    uv("venv", "--clear", "--python", sys.executable, str(folder))
    limits = folder / "constraints.txt"
    limits.write_text(constraints(trainer))
    install = ("pip", "install", "--python", str(python), "--constraints", str(limits))
    uv(*install, "torch")
    uv(*install, *BASE, *trainer.needs, "--editable", str(ROOT))
    if trainer.bare:
        newer = ("--python-version", trainer.bare_python) if trainer.bare_python else ()
        uv(*install, "--no-deps", *newer, *trainer.bare)
    stamp.write_text(wanted)
    return python


def _uv(folder: Path) -> Callable[..., None]:
    """uv, installed where it is missing, with a cache in the same folder so that files can be shared."""
    home = folder / ".uv"
    if not (home / "bin" / "uv").exists():
        venv.create(home, with_pip=True, clear=True)
        subprocess.run([str(home / "bin" / "pip"), "-q", "install", UV], check=True)
    environment = {**os.environ, "UV_CACHE_DIR": str(folder / ".uv-cache")}
    if found := os.environ.get("PIP_FIND_LINKS"):  # uv reads none of pip's settings
        environment.setdefault("UV_FIND_LINKS", ",".join(found.split()))

    def call(*words: str) -> None:
        subprocess.run([str(home / "bin" / "uv"), "--quiet", *words], check=True, env=environment)

    return call


def run(name: str, python: Path, results: Path) -> bool:
    """Whether all tests of the trainer passed; what they showed is then appended to the results."""
    fresh = python.parent.parent / "rows.jsonl"
    fresh.unlink(missing_ok=True)
    # Not in PYTHONPATH: an environment sees what is installed in it.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"PADLESS_TRAINER": name, "PADLESS_TRAINER_ROWS": str(fresh), "OMP_NUM_THREADS": "1"}
    tests = [f"tests/{module}.py" for module in TRAINERS[name].tests]
    # -P keeps the root off sys.path: `runtime` and `kernels` are names that others use too.
    words = [str(python), "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    if subprocess.run(words, cwd=ROOT, env=environment).returncode:
        return False
    rows = fresh.read_text() if fresh.exists() else ""
    with results.open("a") as out:
        out.write(rows)
    return bool(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=[*TRAINERS], metavar="NAME", help=", ".join(TRAINERS))
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv-trainers", metavar="FOLDER")
    parser.add_argument("--results", type=Path, default=ROOT / "scripts" / "results" / "trainers.jsonl")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in TRAINERS]:
        parser.error(f"{unknown[0]!r} is none of {', '.join(TRAINERS)}")
    failed = []
    for name in options.names:
        try:
            passed = run(name, make(name, options.environments.absolute() / name), options.results)
        except subprocess.CalledProcessError as error:
            print(f"{name}: {' '.join(error.cmd)} ended with {error.returncode}", file=sys.stderr)
            passed = False
        if not passed:
            failed.append(name)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
