"""A trained model with its card, in a folder or on the hub; `local-dir:` and `hf-hub:` load it again."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub.utils import validate_repo_id

from prolip.fitting.attach import FILES, check_folder
from prolip.hub.card import CARD, CardInfo, ModelFolder, find_source, make_card
from prolip.loading import is_prolip
from prolip.models.checkpoint import save_pretrained
from prolip.models.prolip import ProLIP
from prolip.uncertainty.openclip import FILE
from prolip.utils.documents import read_json
from prolip.utils.links import check_links
from prolip.utils.outputs import replacing_folder

FIGURES = "eval.json"


def save(
    source: ModelFolder, folder: Path, info: CardInfo, address: str | None = None, overwrite: bool = False
) -> list[Path]:
    """Copy a model's files, write its card and figures beside them; the written files, in order.

    address: of the model on its card; without, this folder. overwrite: replace a README.md that is no card of ours. The
    weights stay bit for bit; the configuration of one of OpenCLIP's names the file of its variances. ValueError as
    `check_folder`, and for a README.md of another origin.
    """
    check_links(source.folder)
    names = [name for name in FILES if (source.folder / name).is_file()]
    check_folder(folder, names, is_prolip(f"local-dir:{source.folder}"), source.folder)
    there = (folder / CARD).read_text(encoding="utf-8", errors="replace") if (folder / CARD).exists() else ""
    head = there.partition("\n---\n")[0]
    own = head.startswith("---\n") and "\nlibrary_name: prolip\n" in head and "- probabilistic-embeddings" in head
    if not (overwrite or own) and (folder / CARD).exists():
        raise ValueError(f"{folder / CARD} is not a card of this program: give another folder, or --overwrite")
    card = make_card(source, info, address or f"local-dir:{folder}")  # known to be loadable before anything is written
    texts = {CARD: card} | ({FIGURES: json.dumps(source.metrics, indent=2) + "\n"} if source.metrics else {})
    if "open_clip_config.json" in names and (source.folder / FILE).is_file():
        config = read_json(source.folder / "open_clip_config.json") | {"uncertainty": FILE}
        texts["open_clip_config.json"] = json.dumps(config, indent=2) + "\n"
    gone = {*FILES, *((FIGURES,) if own else ())}
    with replacing_folder(folder, kept=lambda name: name not in gone) as place:
        for name in names:
            shutil.copyfile(source.folder / name, place / name)
        for name, text in texts.items():
            (place / name).write_text(text, encoding="utf-8")
    return [folder / name for name in dict.fromkeys((*names, *texts))]


def push_to_hub(
    model: ProLIP | str | os.PathLike,
    repo: str,
    *,
    tokenizer: Any = None,
    license: str | None = None,
    data_license: str | None = None,
    private: bool = False,
) -> str:
    """Put a model with its card on the hub as `org/name`; the address that loads it.

    model: in memory, which has no figures yet, or the folder of a run or model; tokenizer: one of `get_tokenizer`'s, of
    a model in memory; license: in the hub's words, mit or cc-by-4.0; data_license: a sentence. ValueError for a name
    that the hub does not take, ConnectionError where it refuses or is not reached.
    """
    check_repo(repo)
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        if isinstance(model, ProLIP):
            model = save_pretrained(model, place / "memory", tokenizer)
        elif tokenizer is not None:
            raise ValueError(f"a tokenizer for {os.fspath(model)}: a folder has its own; leave it out")
        info = CardInfo(repo.split("/")[1], license, data_license)
        save(find_source(os.fspath(model)), place / "model", info, f"hf-hub:{repo}")
        return push(place / "model", repo, private)


def check_repo(repo: str) -> None:
    """ValueError for what is no `org/name`."""
    validate_repo_id(repo)
    if "/" not in repo:
        raise ValueError(f"{repo!r} has no owner: give org/name")


def push(folder: Path, repo: str, private: bool = False, say: Callable[[str], None] = print) -> str:
    """Put a folder that `save` wrote on the hub as `org/name`, made if it is not there; its address.

    With the account that `hf auth login` or HF_TOKEN gives. ConnectionError where the hub refuses or is not reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    check_links(folder)
    api = HfApi()
    names = [name for name in (*FILES, CARD, FIGURES) if (folder / name).is_file()]
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        say(f"{repo}: uploading {len(names)} files")
        message = "Add the model with its card"
        api.upload_folder(repo_id=repo, folder_path=folder, allow_patterns=names, commit_message=message)
    except (HfHubHTTPError, OSError) as error:
        why = str(error).strip().splitlines()[0]
        raise ConnectionError(f"{repo} could not be written ({why}): log in with `hf auth login`") from error
    return f"hf-hub:{repo}"
