"""Several processes, one list of tasks: who takes which, until all are done."""
from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from prolip.evaluation.datasets.base import fingerprint
from prolip.evaluation.suites.datacomp.store import Identity, Line, Store, finished
from prolip.evaluation.suites.datacomp.tasks import Task
from prolip.evaluation.task import TaskResult

#: Seconds between two looks at tasks that other processes hold.
POLL = 5.0

Evaluate = Callable[[Task, tuple[Identity, ...]], Mapping[Identity, TaskResult]]
Tell = Callable[[Task, Mapping[Identity, TaskResult]], None]


def share_tasks(
    tasks: Sequence[Task],
    store: Store,
    identities: Sequence[Identity],
    marks: Mapping[str, str],
    evaluate: Evaluate,
    say: Callable[[str], None] = print,
    tell: Tell = lambda task, results: None,
    poll: float = POLL,
) -> dict[str, str]:
    """Evaluate what is not finished yet and nobody else is at; returns why tasks failed, by key.

    Any number of processes may run this on one store: each task is evaluated once, results are on disk before the claim
    is let go, and the tasks of a process that is killed are taken up by the others, which wait for each other at the
    end. identities: one model with one similarity or several, which share a task's embeddings; marks: data marks by
    key; tell: of a task whose results are on disk. A task whose data cannot be read (OSError, ValueError) does not end
    the others.
    """
    failed: dict[str, str] = {}
    reported = ""
    while True:
        wanted = wanted_of(tasks, store, identities, marks)
        pending = [task for task in tasks if wanted[task.key] and task.key not in failed]
        if not pending:
            return failed
        held = []
        for task in pending:
            # whatever the similarity, but another model may be at the same task
            model = fingerprint(identities[0].fingerprint, identities[0].precision, digits=16)
            name = f"{task.key}-{model}"
            with store.claim(name) as mine:
                if not mine:
                    held.append(f"{task.name} ({store.holder(name)})")
                    continue
                still = wanted_of([task], store, identities, marks)[task.key]  # another may have just let it go
                try:
                    results = evaluate(task, still) if still else {}
                except (OSError, ValueError) as error:
                    failed[task.key] = str(error)
                    say(f"{task.name} failed: {error}")
                else:
                    for identity, result in results.items():
                        store.append(Line(identity, marks[task.key], result))
                    if results:
                        tell(task, results)
        if len(held) == len(pending):
            waiting = f"waiting for {', '.join(held)}"
            if waiting != reported:
                say(waiting)
            reported = waiting
            time.sleep(poll)


def wanted_of(
    tasks: Sequence[Task], store: Store, identities: Sequence[Identity], marks: Mapping[str, str]
) -> dict[str, tuple[Identity, ...]]:
    """Which identities have no result of a task yet, by key."""
    lines = store.lines()
    there = [(identity, finished(lines, identity, marks)) for identity in identities]
    return {task.key: tuple(identity for identity, keys in there if task.key not in keys) for task in tasks}


def shard(tasks: Sequence[Task], index: int, count: int) -> tuple[Task, ...]:
    """This shard's tasks: the largest first, each to the shard with the fewest images, so that all end together."""
    loads, mine = [0] * count, []
    for task in sorted(tasks, key=lambda task: (-task.size, task.key)):
        least = loads.index(min(loads))
        loads[least] += task.size
        if least == index:
            mine.append(task.key)
    return tuple(task for task in tasks if task.key in mine)
