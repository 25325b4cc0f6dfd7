import pytest

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


def test_few_samples_are_judged_at_the_end_of_the_epoch_only():
    guard = FaultGuard(0.01)
    guard.add(counts(samples=50, bad=1))
    with pytest.raises(TooManyBadSamples, match=r"1 of 50 samples \(2.0%\)"):
        guard.end_epoch()


def test_a_window_above_the_limit_is_fatal_at_once_with_kinds_keys_and_shards():
    guard = FaultGuard(0.01)
    guard.add(counts(samples=990, bad=10))
    with pytest.raises(TooManyBadSamples) as error:
        guard.add(counts(samples=10, bad=1))
    for part in ("11 of 1000 samples", "1.1%", "bad image 11", "'k0' of a.tar", "--max-bad-fraction"):
        assert part in str(error.value)


def test_the_limit_itself_is_allowed_and_windows_start_afresh():
    guard = FaultGuard(0.01)
    for _ in range(3):
        guard.add(counts(samples=1000, bad=10))
    guard.end_epoch()
    assert guard.total.summary()["bad image"] == 30


def test_a_late_burst_is_seen_although_the_epoch_so_far_was_clean():
    guard = FaultGuard(0.01)
    guard.add(counts(samples=100_000))
    with pytest.raises(TooManyBadSamples):
        guard.add(counts(samples=1000, bad=11))


def test_broken_shards_are_held_against_the_shards_that_were_opened():
    guard = FaultGuard(0.01)
    guard.add(counts(samples=5000, shards=5, broken=1))
    with pytest.raises(TooManyBadSamples, match=r"1 of 5 shards \(20.0%\)"):
        guard.end_epoch()
    guard.start_epoch()
    with pytest.raises(TooManyBadSamples, match="2 of 100 shards"):
        guard.add(counts(samples=100, shards=100, broken=2))


def test_a_new_epoch_forgets_the_old_one_but_the_total_stays():
    guard = FaultGuard(0.5)
    guard.add(counts(samples=10, bad=9))
    guard.start_epoch()
    guard.add(counts(samples=10))
    guard.end_epoch()
    assert guard.total.summary() == {"samples": 20, "shards": 0, "bad image": 9}
