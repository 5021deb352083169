"""Unsloth's kernels as a peer of bench_rope: loaded by themselves, and what is not there is said."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

pytest.importorskip("torch")
sys.path.insert(0, str(ROOT / "scripts"))

from peer_unsloth import load_unsloth  # noqa: E402

RAISES = "raise AssertionError('run as a whole')"


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder laid out like Unsloth's unpacked wheels, whose packages raise where they run as a whole."""
    files = {
        "unsloth/__init__.py": RAISES,
        "unsloth/kernels/__init__.py": RAISES,
        "unsloth/kernels/utils.py": "from unsloth_zoo.log import logger\nfrom unsloth_zoo.utils import found",
        "unsloth/kernels/rope_embedding.py": "from .utils import found\nfast_rope_embedding = lambda: found",
        "unsloth/kernels/qk_norm_rope.py": "fast_qk_norm_rope = lambda: 'norm'",
        "unsloth_zoo/__init__.py": RAISES,
        "unsloth_zoo/log.py": RAISES,
        "unsloth_zoo/utils.py": "found = 'rope'",
        "unsloth-1.2.3.dist-info/METADATA": "Name: unsloth\nVersion: 1.2.3\n",
        "unsloth_zoo-1.2.3.dist-info/METADATA": "Name: unsloth_zoo\nVersion: 1.2.3\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("UNSLOTH_ALLOW_CPU", "")
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("unsloth")]:
        del sys.modules[name]


def test_its_kernels_are_loaded_without_the_package_around_them(wheels: Path) -> None:
    kernels = load_unsloth(wheels)
    assert (kernels.rope(), kernels.norm_rope()) == ("rope", "norm")


def test_a_folder_without_a_wheel_is_named(wheels: Path) -> None:
    (wheels / "unsloth_zoo-1.2.3.dist-info").rename(wheels / "elsewhere")
    with pytest.raises(ImportError, match=f"{wheels} holds no unpacked wheel of unsloth_zoo"):
        load_unsloth(wheels)


def test_a_release_whose_kernels_lie_elsewhere_is_said_with_its_version(wheels: Path) -> None:
    (wheels / "unsloth/kernels/qk_norm_rope.py").unlink()
    with pytest.raises(ImportError, match="unsloth_zoo-1.2.3.dist-info: ModuleNotFoundError: .*qk_norm_rope"):
        load_unsloth(wheels)
