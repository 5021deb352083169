"""A run that is stopped in loader workers goes on under others: each pack once, in the one order."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from building import DEMO, built
from hypothesis import given, settings
from hypothesis import strategies as st
from loaders import InWorkers, as_worker
from packed import write_numbered
from ranks import numbers
from reference_order import balanced_order_of, order_of

from padless.runtime.dataset import PackedDataset
from padless.runtime.errors import StateError, StreamError
from padless.runtime.stream import PackedStream

PACKS = 23


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_numbered(
        tmp_path_factory.mktemp("loader") / "packed", PACKS, packs_per_shard=6, packs_per_batch=3
    )


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    """A state as a checkpoint that keeps text gives it back."""
    loaded: dict[str, Any] = json.loads(json.dumps(state))
    return loaded


class Run:
    """All ranks of a run in one geometry, going on from a state of any of them."""

    def __init__(
        self,
        path: Path,
        state: dict[str, Any] | None,
        *,
        world_size: int,
        workers: int,
        every: int = 1,
        own: bool = False,
        **options: Any,
    ) -> None:
        """`own`: the state goes into the loader instead of the stream."""
        self.loaders: list[Any] = []
        self.states: list[Any] = []
        self.epochs = []
        for rank in range(world_size):
            stream = PackedStream(path, rank=rank, world_size=world_size, **options)
            if state is not None and not own:
                stream.load_state_dict(through_json(state))
            self.epochs.append(stream.epoch)
            if workers:
                loader = InWorkers(stream, workers, every=every, state=state if own else None)
                self.loaders.append(loader)
                self.states.append(loader)
            else:
                self.loaders.append(iter(stream))
                self.states.append(stream)

    def steps(self, most: int) -> Iterator[list[int]]:
        """The packs of each step over all ranks; fails where one has a batch more than another."""
        for _ in range(most):
            batches = [next(loader, None) for loader in self.loaders]
            if all(batch is None for batch in batches):
                return
            yield sum((numbers(batch) for batch in batches), [])

    def state(self) -> dict[str, Any]:
        states = [source.state_dict() for source in self.states]
        assert all(other == states[0] for other in states)
        found: dict[str, Any] = states[0]
        return found


GEOMETRIES = {
    "world_size": st.sampled_from([1, 2, 3, 8]),
    "workers": st.sampled_from([0, 1, 3]),
    "packs_per_batch": st.integers(1, 2),
    "every": st.integers(1, 3),
}


@settings(max_examples=30, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**62 - 1))
def test_ranks_workers_and_batches_may_change_at_every_stop(
    packed: Path, data: st.DataObject, seed: int
) -> None:
    state: dict[str, Any] | None = None
    expected = order_of(PACKS, seed, 0)
    taken = 0
    for _ in range(data.draw(st.integers(1, 4))):
        drawn = data.draw(st.fixed_dictionaries(GEOMETRIES))
        group = drawn["world_size"] * drawn["packs_per_batch"]
        run = Run(packed, state, seed=seed, remainder="pad", **drawn)
        if set(run.epochs) != {0}:
            break
        for step in run.steps(data.draw(st.integers(0, 5))):
            assert sorted(step) == sorted(expected[taken : taken + group])
            taken += len(step)
        state = run.state()
    rest = Run(packed, state, seed=seed, world_size=1, workers=0)
    if rest.epochs == [0]:
        assert sum(rest.steps(PACKS), []) == expected[taken:]
    else:
        assert taken == PACKS
        assert sum(rest.steps(PACKS), []) == order_of(PACKS, seed, 1)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), seed=st.integers(0, 99))
def test_balanced_steps_too_hold_each_pack_once_whatever_changes(
    packed: Path, data: st.DataObject, seed: int
) -> None:
    state: dict[str, Any] | None = None
    seen: list[int] = []
    for _ in range(data.draw(st.integers(1, 4))):
        drawn = data.draw(st.fixed_dictionaries(GEOMETRIES))
        run = Run(packed, state, seed=seed, remainder="pad", balance="attention", **drawn)
        if set(run.epochs) != {0}:
            break
        seen += sum(run.steps(data.draw(st.integers(0, 5))), [])
        state = run.state()
    rest = Run(packed, state, seed=seed, world_size=1, workers=0, balance="attention")
    seen += sum(rest.steps(PACKS), []) if rest.epochs == [0] else []
    assert sorted(seen) == list(range(PACKS))


@settings(max_examples=25, deadline=None)
@given(
    geometry=st.fixed_dictionaries(GEOMETRIES | {"workers": st.sampled_from([1, 2, 3])}),
    balance=st.sampled_from([None, "attention"]),
    stops=st.lists(st.integers(0, 6), max_size=3),
    seed=st.integers(0, 99),
    epoch=st.integers(0, 2),
)
def test_a_loader_that_goes_on_by_itself_ends_as_one_that_never_stopped(
    packed: Path,
    geometry: dict[str, Any],
    balance: str | None,
    stops: list[int],
    seed: int,
    epoch: int,
) -> None:
    group = geometry["world_size"] * geometry["packs_per_batch"]
    if balance is None:
        expected = order_of(PACKS, seed, epoch)
    else:
        costs = [24_576 * length + length**2 for length in (1 + number % 7 for number in range(PACKS))]
        expected = balanced_order_of(costs, group, seed, epoch)
    state: dict[str, Any] | None = None
    steps: list[list[int]] = []
    for stop in [*stops, PACKS]:
        run = Run(
            packed, state, own=True, seed=seed, epoch=epoch, balance=balance, remainder="pad", **geometry
        )
        steps += run.steps(stop)
        state = run.state()
    assert [sorted(step) for step in steps] == [
        sorted(expected[start : start + group]) for start in range(0, PACKS, group)
    ]


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_steps_of_one_length_go_on_under_other_workers(lengths: Path, data: st.DataObject) -> None:
    whole = PackedStream(lengths, tokens_per_batch=1024, rank=0, world_size=1)
    expected = [batch["sequence_ids"].tolist() for batch in whole]
    state: dict[str, Any] | None = None
    got: list[list[int]] = []
    for stop in data.draw(st.lists(st.integers(0, 9), max_size=3)):
        stream = PackedStream(lengths, tokens_per_batch=1024, rank=0, world_size=1)
        if state is not None:
            stream.load_state_dict(through_json(state))
        workers = data.draw(st.sampled_from([1, 2, 3]))
        loader = InWorkers(stream, workers, every=data.draw(st.integers(1, 4)))
        got += [batch["sequence_ids"].tolist() for _, batch in zip(range(stop), loader, strict=False)]
        state = loader.state_dict()
    stream = PackedStream(lengths, tokens_per_batch=1024, rank=0, world_size=1)
    if state is not None:
        stream.load_state_dict(through_json(state))
    got += [batch["sequence_ids"].tolist() for batch in stream] if stream.epoch == 0 else []
    assert got == expected


@pytest.fixture(scope="module")
def lengths(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packs of three lengths."""
    path = tmp_path_factory.mktemp("lengths") / "packed"
    built(DEMO, path, "--max-length", "256,512,1024", "--packs-multiple", 8)
    return path


@pytest.mark.parametrize(("before", "balance"), [(0, None), (1, None), (2, "attention")])
def test_torchdatas_own_states_go_on_under_other_workers(
    packed: Path, before: int, balance: str | None
) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def opened(world_size: int) -> list[PackedStream]:
        options: dict[str, Any] = {"seed": 5, "balance": balance, "remainder": "pad"}
        return [PackedStream(packed, rank=r, world_size=world_size, **options) for r in range(world_size)]

    def loader_of(stream: PackedStream, workers: int) -> Any:
        context = "fork" if workers else None
        return stateful.StatefulDataLoader(
            stream,
            batch_size=None,
            num_workers=workers,
            multiprocessing_context=context,
            snapshot_every_n_steps=3,
        )

    for stop, after in ((0, 1), (4, 2), (8, 0)):
        seen, states = [], []
        for stream in opened(2):
            loader = loader_of(stream, before)
            seen += [
                number for _, batch in zip(range(stop), loader, strict=False) for number in numbers(batch)
            ]
            states.append(loader.state_dict())
        for stream, state in zip(opened(3), [*states, states[0]], strict=True):
            stream.load_state_dict(state)
            seen += sum((numbers(batch) for batch in loader_of(stream, after)), [])
        assert sorted(seen) == list(range(PACKS))


def test_a_worker_says_how_to_go_on_under_another_number(packed: Path) -> None:
    state = kept_state(packed)
    with pytest.raises(StateError, match=r"as many workers as before.*stream.load_state_dict\(state\)"):
        InWorkers(PackedStream(packed, rank=0, world_size=1), 2, state=state)


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("spawns", [True, False])
def test_a_stateful_loader_that_yields_batches_as_they_come_is_refused(
    packed: Path, spawns: bool, in_order: bool
) -> None:
    # Torchdata's own loader takes ten seconds to end after an error in its workers.
    stateful = pytest.importorskip("torchdata.stateful_dataloader.stateful_dataloader")
    name = stateful._StatefulMultiProcessingDataLoaderIter.__name__

    def first_batch(loader: Any, workers: int) -> list[int]:
        """Of worker 0, which is spawned with a copy of the stream, or forked while its loader runs."""
        stream = PackedStream(packed, rank=0, world_size=1)
        with as_worker(0, workers, stream):
            return numbers(next(iter(pickle.loads(loader.pickled(stream)) if spawns else stream)))

    class Loader:
        _in_order = in_order

        def pickled(self, stream: PackedStream) -> bytes:
            return pickle.dumps(stream)

        def forks(self, workers: int) -> list[int]:
            return first_batch(self, workers)

    Loader.__name__ = name
    begin = (lambda workers: first_batch(Loader(), workers)) if spawns else Loader().forks
    assert begin(1) == order_of(PACKS, 0, 0)[:1], "one worker's batches come in order"
    if in_order:
        assert begin(2) == order_of(PACKS, 0, 0)[:1]
    else:
        with pytest.raises(StreamError, match="in_order=False.*which have come"):
            begin(2)


def kept_state(packed: Path) -> dict[str, Any]:
    """A state of three workers after five batches, the last two of which came after a snapshot."""
    loader = InWorkers(PackedStream(packed, rank=0, world_size=1), 3, every=3)
    for _ in range(5):
        next(loader)
    return through_json(loader.state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda state: state["_snapshot"].pop("_last_yielded_worker_id"),
            "'_last_yielded_worker_id'.*0.8 to",
        ),
        (lambda state: state["_snapshot"].update(_last_yielded_worker_id=3), r"worker 3 of \(3, 3\)"),
        (
            lambda state: state["_snapshot"]["_worker_snapshots"].update(
                worker_2=state["_snapshot"]["_worker_snapshots"]["worker_1"]
            ),
            r"worker \[1, 3\] stands for worker 2 of 3",
        ),
        (lambda state: state["_snapshot"]["_main_snapshot"].update(_num_workers=2), r"of \(3, 2\)"),
        (lambda state: state["_snapshot"]["_worker_snapshots"].pop("worker_0"), r"of \(2, 3\)"),
        (lambda state: state.update(_steps_since_snapshot=21), "steps beyond the end of its epoch"),
        (lambda state: state.update(_steps_since_snapshot=-1), "-1 steps"),
        (lambda state: state.pop("_snapshot"), "it is none of a PackedStream"),
        (lambda state: state.clear(), "the state has nothing"),
        (
            lambda state: state["_snapshot"]["_worker_snapshots"]["worker_2"].update(dataset_state=None),
            "no PackedStream for its data set",
        ),
        (
            lambda state: state["_snapshot"]["_worker_snapshots"]["worker_2"]["dataset_state"].pop("steps"),
            "how its steps were made",
        ),
        (
            lambda state: state["_snapshot"]["_worker_snapshots"]["worker_2"]["dataset_state"].update(seed=1),
            "seed=1, this stream has seed=0",
        ),
    ],
)
def test_a_loaders_state_that_is_not_understood_is_refused(packed: Path, change: Any, message: str) -> None:
    state = kept_state(packed)
    change(state)
    stream = PackedStream(packed, rank=0, world_size=1)
    before = stream.state_dict()
    with pytest.raises(StateError, match=message):
        stream.load_state_dict(state)
    assert stream.state_dict() == before


def test_what_is_no_dict_and_what_is_another_data_sets_is_no_state(packed: Path) -> None:
    stream = PackedStream(packed, rank=0, world_size=1)
    with pytest.raises(StateError, match="is a NoneType, not the dict"):
        stream.load_state_dict(None)  # type: ignore[arg-type]
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    loader = stateful.StatefulDataLoader(PackedDataset(packed), batch_size=None)
    with pytest.raises(StateError, match="no PackedStream for its data set"):
        stream.load_state_dict(loader.state_dict())
