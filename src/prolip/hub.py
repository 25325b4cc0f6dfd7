"""Files of the public model hub: from the cache first, and without the minutes of retries when there is no network."""
from __future__ import annotations

import os
import urllib.error
import urllib.request

PROBE_SECONDS = 5.0


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


def hub_file(repo: str, names: tuple[str, ...], cache_dir: str | None = None) -> str:
    """The first of `names` that `repo` has, as a local path; `FileNotFoundError` says how to get it by hand."""
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise ImportError("hf-hub: needs huggingface_hub: pip install huggingface_hub") from error

    for name in names:
        try:
            return hf_hub_download(repo, name, cache_dir=cache_dir, local_files_only=True)
        except (LocalEntryNotFoundError, EntryNotFoundError):
            continue
    reason = "HF_HUB_OFFLINE is set" if offline() else "the hub cannot be reached"
    if reachable():
        reason = f"it has none of {', '.join(names)}"
        for name in names:
            try:
                return hf_hub_download(repo, name, cache_dir=cache_dir)
            except EntryNotFoundError:
                continue
            except (HfHubHTTPError, OSError) as error:
                reason = str(error).splitlines()[0]
                break
    raise FileNotFoundError(
        f"no {names[0]} of {repo} in the local cache, and {reason}. Where there is a network run"
        f" `hf download {repo} --local-dir <folder>`, copy the folder here and use local-dir:<folder>"
    )
