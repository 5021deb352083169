"""A tokenizer.json in the older spelling of its merges says what it said before."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from building import TOKENIZER
from hypothesis import example, given
from hypothesis import strategies as st

from padless.packer.tokenizer_files import respell


def pairs_of(data: bytes) -> tuple[dict[str, Any], list[list[str]]]:
    """A tokenizer.json without its merges, and these as pairs."""
    spec = json.loads(data)
    merges = spec["model"].pop("merges")
    return spec, [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]


HALVES = st.text(st.sampled_from('ab"\\[],\n \u0120\u00e9'), min_size=1, max_size=3)


@given(
    merges=st.lists(st.lists(HALVES, min_size=2, max_size=2), max_size=4), indent=st.sampled_from([None, 2])
)
@example(merges=[['",', '"']], indent=2)
@example(merges=[["a b", "c"], ["d", "e"]], indent=2)
@example(merges=[["a", "b"], ["c"]], indent=2)
def test_merges_are_the_same_in_either_spelling(merges: list[list[str]], indent: int | None) -> None:
    spec = {"added_tokens": [], "model": {"type": "BPE", "vocab": {"[": 0}, "merges": merges}}
    data = json.dumps(spec, indent=indent, ensure_ascii=False).encode()
    assert pairs_of(respell(data)) == pairs_of(data)


@pytest.mark.shared
@pytest.mark.parametrize("name", ["qwen3", "llama3.1", "mistral-sp", "gpt2"])
def test_real_tokenizers_are_the_same_in_either_spelling(shared: Path, name: str) -> None:
    data = (shared / "tokenizers" / name / "tokenizer.json").read_bytes()
    assert pairs_of(respell(data)) == pairs_of(data)


def test_an_indented_file_is_respelled() -> None:
    data = (Path(TOKENIZER) / "tokenizer.json").read_bytes()
    indented = json.dumps(json.loads(data), indent=2, ensure_ascii=False).encode()
    assert all(isinstance(merge, str) for merge in json.loads(respell(indented))["model"]["merges"])


def test_a_process_that_needs_no_tokenizer_any_more_waits_for_its_load() -> None:
    """One that came back from native code while Python was taken down aborted a process that was done."""
    code = """
import atexit, sys
from padless.packer.tokenizer_files import start_loading
loading = start_loading(sys.argv[1])
loading.begun.wait()
print(loading.fast.done())
atexit.register(lambda: print(loading.fast.done()))
"""
    ended = subprocess.run([sys.executable, "-c", code, str(TOKENIZER)], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "False\nTrue\n", "")
