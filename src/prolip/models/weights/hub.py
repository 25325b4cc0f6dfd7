"""Files of the public model hub: from the cache first, and without the minutes of retries when there is no network."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from pathlib import Path

PROBE_SECONDS = 5.0


class HubFileNotFoundError(FileNotFoundError):
    """A file is neither in the local cache nor to be had from the hub; the message says why, not what to do."""


def offline() -> bool:
    """Whether the user asked for no network."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def reachable(timeout: float = PROBE_SECONDS) -> bool:
    """Whether the hub answers one request (proxies of the environment are used); never raises."""
    if offline():
        return False
    from huggingface_hub.constants import ENDPOINT

    try:
        with urllib.request.urlopen(urllib.request.Request(ENDPOINT, method="HEAD"), timeout=timeout):
            return True
    except urllib.error.HTTPError as error:
        return error.code < 500
    except (OSError, ValueError):
        return False


def hub_file(repo: str, names: tuple[str, ...], cache_dir: str | None = None) -> Path:
    """The first of `names` that `repo` has, as a local path; the others are not downloaded."""
    try:
        folder = hub_files(repo, *((name,) for name in names), cache_dir=cache_dir)
    except HubFileNotFoundError as error:
        raise HubFileNotFoundError(
            f"{error}. Where there is a network run `hf download {repo} --local-dir <folder>`, copy the folder here and"
            " use local-dir:<folder>, or give its weights as --pretrained"
        ) from error
    return next(folder / name for name in names if (folder / name).is_file())


def hub_files(repo: str, *groups: tuple[str, ...], cache_dir: str | None = None) -> Path:
    """The local folder with those files that `repo` has of the first group of names of which it has any.

    The cache is asked before the hub. Raises if there is none of any group.
    """
    from huggingface_hub import snapshot_download  # late: it takes a second
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    reason = "HF_HUB_OFFLINE is set" if offline() else "the hub cannot be reached"
    for local_only in (True, False):
        if not local_only:
            if not reachable():
                break
            reason = "the repository has none"
        for names in groups:
            try:
                found = snapshot_download(
                    repo, cache_dir=cache_dir, allow_patterns=list(names), local_files_only=local_only
                )
            except HFValidationError as error:
                raise ValueError(f"{repo!r} is no name of the hub: want org/name ({error})") from error
            except (HfHubHTTPError, OSError) as error:
                reason = reason if local_only else str(error).splitlines()[0]
                continue
            if any((Path(found) / name).is_file() for name in names):
                return Path(found)
    wanted = " or ".join(name for names in groups for name in names)
    raise HubFileNotFoundError(f"no {wanted} of {repo} in the local cache, and {reason}")
