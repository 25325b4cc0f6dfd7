"""Faults are counted by kind, and end a run where too many are surely bad, over a window, an epoch, or all ranks."""

import pytest

from prolip.data import faults
from prolip.data.faults import FaultCounter, FaultGuard, SampleFault, ShardFault, TooManyBadSamples


def counts(samples=0, shards=0, bad=0, broken=0):
    counter = FaultCounter(samples=samples, shards=shards)
    for index in range(bad):
        counter.add(SampleFault("bad image", "cut"), f"k{index}", "a.tar")
    for _ in range(broken):
        counter.add(ShardFault("broken shard", "no end"), url="b.tar")
    return counter


def test_drain_hands_over_everything_once():
    counter = counts(samples=10, shards=2, bad=3, broken=1)
    total = FaultCounter()
    total.merge(counter.drain())
    total.merge(counter.drain())
    assert total.summary() == {"samples": 10, "shards": 2, "bad image": 3, "broken shard": 1}
    assert counter.summary() == {"samples": 0, "shards": 0}
    assert (total.bad_samples, total.bad_shards) == (3, 1)


def test_what_may_be_chance_is_judged_at_the_end_of_the_epoch_and_the_limit_itself_is_allowed():
    for samples, bad in ((50, 1), (1000, 25)):
        guard = FaultGuard(0.01)
        guard.add(counts(samples=samples, bad=bad))
        with pytest.raises(TooManyBadSamples, match=rf"{bad} of {samples} samples \({bad / samples:.1%}\)"):
            guard.end_epoch()
    guard = FaultGuard(0.01)
    for _ in range(3):
        guard.add(counts(samples=1000, bad=10))
    guard.end_epoch()
    assert guard.total.summary()["bad image"] == 30


def test_what_is_surely_above_the_limit_is_fatal_at_once_with_kinds_keys_and_shards():
    guard = FaultGuard(0.01)
    guard.add(counts(samples=990, bad=25))
    with pytest.raises(TooManyBadSamples) as error:
        guard.add(counts(samples=10, bad=1))  # 10 are expected of 1000 at 1%; 5 standard deviations more are 25.7
    for part in ("26 of 1000 samples", "2.6%", "bad image 26", "'k0' of a.tar", "--max-bad-fraction"):
        assert part in str(error.value)


def test_a_bad_shard_of_a_long_clean_epoch_does_not_end_it_and_data_that_turns_bad_does():
    guard = FaultGuard(0.01)
    guard.add(counts(samples=1_000_000))
    guard.add(counts(samples=2000, bad=2000))
    with pytest.raises(TooManyBadSamples, match="11000 of 1020000 samples"):
        for _ in range(10):
            guard.add(counts(samples=2000, bad=1000))


def test_broken_shards_are_held_against_those_that_were_opened_over_all_ranks():
    guard = FaultGuard(0.01)
    guard.add(counts(samples=1000, shards=31, broken=1))
    others = FaultCounter(samples=1000, shards=31).to_dict()
    guard.end_epoch(lambda mine, judge: judge([others] * 31 + [mine]))
    with pytest.raises(TooManyBadSamples, match=r"1 of 31 shards"):
        guard.end_epoch()
    with pytest.raises(TooManyBadSamples, match=r"2 of 124 shards(.|\n)*broken shard 2"):
        guard.end_epoch(lambda mine, judge: judge([mine, mine, others, others]))
    guard = FaultGuard(0.01)
    guard.add(counts(samples=5000, shards=5, broken=1))
    with pytest.raises(TooManyBadSamples, match=r"1 of 5 shards \(20.0%\)"):
        guard.end_epoch()
    guard = FaultGuard(0.01)
    with pytest.raises(TooManyBadSamples, match="6 of 100 shards"):
        guard.add(counts(samples=100, shards=100, broken=6))


def test_samples_that_are_all_bad_end_a_stream_even_where_any_fraction_is_tolerated(monkeypatch):
    monkeypatch.setattr(faults, "LOST_SAMPLES", 3)
    counter, fault = FaultCounter(), SampleFault("bad image", "cut")
    for _ in range(4):
        counter.lose_sample(fault), counter.lose_sample(fault), counter.use_sample()
    counter.lose_sample(fault), counter.drain(), counter.lose_sample(fault)
    with pytest.raises(TooManyBadSamples, match="3 consecutive samples were unusable"):
        counter.lose_sample(fault)
