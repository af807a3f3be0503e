"""Errors of failed calls on Ray, with role, rank and method."""

import re
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from agentrl_core.api.errors import WorkerError
from agentrl_core.controller.ray_watch import Watch

# After one rank has failed, the others get this long to fail too, so that the message can name them.
OTHERS_GRACE_SECONDS = 1.0
ANSI_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def fetch(method: str, labels: Sequence[str], watch: Watch | None, handles: Sequence[Any]) -> list[Any]:
    """The values of all handles; raises the first failure as soon as there is one."""
    try:
        return list(ray.get(list(handles)))
    except Exception as error:  # noqa: BLE001 - Ray raises the task's own exception class
        if isinstance(error, RayActorError) and watch is not None:
            # This rank may have been ended only because another one, whose death is the news, was waited for.
            watch.raise_if_dead()
        raise _group_error(method, labels, handles, error) from root_cause(error)


def _group_error(method: str, labels: Sequence[str], handles: Sequence[Any], error: BaseException) -> WorkerError:
    done, _ = ray.wait(list(handles), num_returns=len(handles), timeout=OTHERS_GRACE_SECONDS, fetch_local=False)
    failures = {}
    for label, handle in zip(labels, handles, strict=True):
        if handle in done:
            try:
                ray.get(handle, timeout=0)
            except GetTimeoutError:
                continue
            except Exception as failure:  # noqa: BLE001 - Ray raises the task's own exception class
                failures[label] = failure
    same = [label for label, failure in failures.items() if repr(failure) == repr(error)]
    first = next(iter(same or failures), labels[0])
    others = [label for label in failures if label != first]
    also = f"\nAlso failed: {', '.join(others)}" if others else ""
    return WorkerError(describe(f"{first}, in {method!r}", error) + also)


def describe(who: str, error: BaseException) -> str:
    """What failed and how, for the message of a WorkerError."""
    if isinstance(error, RayActorError):
        return f"{who}: the worker process died or cannot be reached. {str(error).strip()}"
    if isinstance(error, RayTaskError):
        return f"{who}: {type(root_cause(error)).__name__}\n{ANSI_COLOURS.sub('', str(error)).strip()}"
    return f"{who}: {type(error).__name__}: {error}"


def root_cause(error: BaseException) -> BaseException:
    """The exception that the remote code raised."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException) and error.cause is not error:
        error = error.cause
    return error
