"""`scripts/test-trainers`: what it lists is there, and what is skipped elsewhere says which run covers it."""

from __future__ import annotations

import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import trainer_environments  # noqa: E402
from trainer_environments import TRAINERS, Trainer  # noqa: E402


def test_every_module_of_a_trainer_is_run_by_its_environment() -> None:
    listed = {module for trainer in TRAINERS.values() for module in trainer.tests}
    written = {path.stem for path in (ROOT / "tests").glob("test_trainers_*.py")}
    assert written <= listed
    assert all((ROOT / "tests" / f"{module}.py").exists() for module in listed)


def test_a_skip_says_which_environment_covers_it() -> None:
    for name, trainer in TRAINERS.items():
        for module in trainer.tests:
            if module.startswith("test_trainers_"):
                assert f"scripts/test-trainers {name}" in (ROOT / "tests" / f"{module}.py").read_text()


def test_versions_that_a_trainer_names_take_the_place_of_ours() -> None:
    ours = trainer_environments.constraints(Trainer(tests=()))
    assert "torch==" in ours and "transformers==" in ours and "pandas" not in ours
    theirs = trainer_environments.constraints(Trainer(needs=("transformers==5.6.0", "torchao"), tests=()))
    assert "transformers" not in theirs and "torch==" in theirs


def test_unknown_names_are_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["test-trainers", "mdss"])
    with pytest.raises(SystemExit) as stop:
        trainer_environments.main()
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert "'mdss'" in told and "mds, megatron" in told
