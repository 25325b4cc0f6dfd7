"""Worker processes: how far ahead they read, what they hold open, how they end."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
from tiny_loaders import build, epoch
from tiny_tars import plain, write_shards
from torch.utils.data import get_worker_info


@pytest.mark.parametrize(("prefetch", "batch_size", "ahead"), [(None, 4, 32), (3, 4, 3)])
def test_workers_prepare_as_many_batches_ahead_as_asked_for_or_the_batch_wants(tmp_path, prefetch, batch_size, ahead):
    drawn = multiprocessing.Value("q", 0)

    def counted(image):
        with drawn.get_lock():
            drawn.value += 1
        return plain(image)

    write_shards(tmp_path, [8, 8])
    settings = {"prefetch": prefetch, "train_num_samples": 64 * batch_size}
    loader = build(tmp_path, batch_size, workers=2, transform=counted, **settings)
    next(iter(loader))
    # Workers have begun one chunk more for the batch that was taken.
    wanted, deadline = (ahead + 1) * batch_size, time.monotonic() + 60
    while drawn.value < wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    assert drawn.value == wanted
    loader.close()


def open_files(process):
    return len(os.listdir(f"/proc/{process}/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files by /proc")
def test_more_tensors_may_wait_than_the_soft_limit_of_files_allowed(tmp_path, request):
    """While one worker is slow, the chunks of the other pile up in this process, two open files each."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, before))
    main, allowed = os.getpid(), open_files("self") + 40
    most, deadline = multiprocessing.Value("q", 0), time.monotonic() + 60

    def slow(image):
        while get_worker_info().id == 0 and most.value <= allowed and time.monotonic() < deadline:
            most.value = max(most.value, open_files(main))
            time.sleep(0.01)
        return plain(image)

    write_shards(tmp_path, [16, 16])
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, before[1]))
    loader = build(tmp_path, batch_size=2, workers=2, transform=slow, train_num_samples=100)
    assert len(epoch(loader)) == 50
    loader.close()
    assert most.value > allowed and resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])


def test_workers_live_through_epochs_and_end_with_the_loader(tmp_path):
    def workers():
        return {child.pid for child in multiprocessing.active_children()}

    write_shards(tmp_path, [4, 4])
    before = workers()
    loader = build(tmp_path, workers=2)
    epoch(loader)
    first = workers() - before
    epoch(loader, 1)
    assert len(first) == 2 and workers() - before == first
    loader.close()
    assert workers() == before
    epoch(loader, 2)
    assert len(workers() - before) == 2
    del loader
    assert workers() == before


def test_workers_go_on_after_a_stop_signal_that_went_to_the_whole_group(tmp_path):
    """The run finishes its step and saves, for which it may need another batch."""
    write_shards(tmp_path, [16, 16])
    loader = build(tmp_path, workers=2, prefetch=1)
    others = set(multiprocessing.active_children())
    batches = iter(loader)
    next(batches)
    for worker in set(multiprocessing.active_children()) - others:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            os.kill(worker.pid, number)
    time.sleep(0.1)
    assert len(list(batches)) == 7
    loader.close()


def test_a_worker_that_is_killed_ends_the_epoch_with_an_error_and_the_others(tmp_path):
    def slow(image):
        time.sleep(0.05)
        return plain(image)

    write_shards(tmp_path, [16, 16])
    loader = build(tmp_path, workers=2, prefetch=1, transform=slow, train_num_samples=800)
    others = set(multiprocessing.active_children())
    batches = iter(loader)
    next(batches)
    os.kill((set(multiprocessing.active_children()) - others).pop().pid, signal.SIGKILL)  # as when memory runs out
    with pytest.raises(RuntimeError, match="killed by signal: Killed|exited unexpectedly"):
        list(batches)
    assert set(multiprocessing.active_children()) == others
