"""Several processes, one list of tasks: who takes which, until all are done."""
from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from prolip.evaluation.datacomp.store import Identity, Line, Store, TaskResult
from prolip.evaluation.datacomp.tasks import Task

POLL = 5.0
"""Seconds between two looks at tasks that other processes hold."""


def share_tasks(
    tasks: Sequence[Task],
    store: Store,
    identity: Identity,
    marks: Mapping[str, str],
    evaluate: Callable[[Task], TaskResult],
    say: Callable[[str], None] = print,
    poll: float = POLL,
) -> dict[str, str]:
    """Evaluate what is not finished yet and nobody else is at; returns why tasks failed, by key.

    Any number of processes may run this on one store: each task is evaluated once, results are on disk before the claim
    is let go, and the tasks of a process that is killed are taken up by the others, which wait for each other at the
    end. marks: data marks by key. A task whose data cannot be read (OSError, ValueError) does not end the others.
    """
    failed: dict[str, str] = {}
    told = ""
    while True:
        finished = store.finished(identity, marks)
        pending = [task for task in tasks if task.key not in finished and task.key not in failed]
        if not pending:
            return failed
        held = []
        for task in pending:
            with store.claim(claim_name(task, identity)) as mine:
                if not mine:
                    held.append(task)
                elif task.key not in store.finished(identity, marks):  # another process may have just let it go
                    try:
                        result = evaluate(task)
                    except (OSError, ValueError) as error:
                        failed[task.key] = str(error)
                        say(f"{task.name} failed: {error}")
                    else:
                        store.append(Line(identity, marks[task.key], result))
        if len(held) == len(pending):
            waiting = f"waiting for {', '.join(f'{t.name} ({store.holder(claim_name(t, identity))})' for t in held)}"
            if waiting != told:
                say(waiting)
            told = waiting
            time.sleep(poll)


def claim_name(task: Task, identity: Identity) -> str:
    """The name of a task's claim: another model or similarity may be at the same task."""
    return f"{task.key}-{identity.mark}"


def parse_shard(text: str | None, environment: Mapping[str, str]) -> tuple[int, int]:
    """(index, count) of "i/n", or of "array": this task of a SLURM array; (0, 1) without. ValueError for others."""
    if text is None:
        return 0, 1
    if text == "array":
        names = ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_STEP", "SLURM_ARRAY_TASK_COUNT")
        if names[0] not in environment or names[3] not in environment:
            raise ValueError("--shard array outside of a SLURM array: submit with sbatch --array=0-7, or give i/n")
        number, first, step, count = (int(environment.get(name, default)) for name, default in zip(names, "0011"))
        index = (number - first) // step
    else:
        try:
            index, count = (int(part) for part in text.split("/"))
        except ValueError:
            raise ValueError(f"--shard {text!r}: write i/n, the first of eight is 0/8") from None
    if not 0 <= index < count:
        raise ValueError(f"shard {index} of {count}: i counts from 0, the last of {count} is {count - 1}/{count}")
    return index, count


def shard(tasks: Sequence[Task], index: int, count: int) -> tuple[Task, ...]:
    """This shard's tasks: the largest first, each to the shard with the fewest images, so that all end together."""
    loads, mine = [0] * count, []
    for task in sorted(tasks, key=lambda task: (-task.size, task.key)):
        least = loads.index(min(loads))
        loads[least] += task.size
        if least == index:
            mine.append(task.key)
    return tuple(task for task in tasks if task.key in mine)
