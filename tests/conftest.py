"""What all tests share: where the real data and tokenizers lie, and what it means if they do not.

They are too large and too differently licensed to be part of the project, so they lie beside the
checkout. Without them the tests that need them are skipped; where they are required (CI) they
fail instead, since a run that skips the real data proves little.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# A run tells of this change, so it tries the same examples each time; to look for others:
# scripts/test --hypothesis-profile explore
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", max_examples=1000, deadline=None)
settings.load_profile("repeatable")

ROOT = Path(__file__).resolve().parent.parent


def find_shared() -> Path | None:
    """The folder with data/ and tokenizers/: PADLESS_SHARED, or `shared` up to two levels up."""
    named = os.environ.get("PADLESS_SHARED")
    places = [Path(named)] if named else [ROOT.parent / "shared", ROOT.parent.parent / "shared"]
    for place in places:
        if (place / "data").is_dir() and (place / "tokenizers").is_dir():
            return place
    return None


def shared_is_required() -> bool:
    """Whether missing real data are a failure: in CI, or where PADLESS_REQUIRE_SHARED asks."""
    required = os.environ.get("PADLESS_REQUIRE_SHARED", os.environ.get("CI", ""))
    return required.lower() not in ("", "0", "false", "no")


@pytest.fixture(scope="session", autouse=True)
def no_log_of_progress() -> Iterator[None]:
    """However slow the machine is, what a test runs counts as short work and writes no log."""
    from padless.packer import progress

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "LOG_SECONDS", math.inf)
        yield


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of the real data and tokenizers; skips, or fails where they are required."""
    found = find_shared()
    if found is not None:
        return found
    reason = (
        f"no real data: neither PADLESS_SHARED nor a folder `shared` beside {ROOT.name} "
        "holds data/ and tokenizers/"
    )
    if shared_is_required():
        pytest.fail(f"{reason}, and they are required here", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def demo_data() -> Path:
    """The folder with the small set (instructions.jsonl) and tokenizer/ that ship with padless."""
    return ROOT / "packer" / "demo_data"


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo set packed with nothing cut, for tests that leave it as it is."""
    from building import DEMO, built

    output = tmp_path_factory.mktemp("whole") / "out"
    built(DEMO, output)
    return output
