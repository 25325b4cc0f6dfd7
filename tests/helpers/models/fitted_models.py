"""Small models with fitted variances, ours and OpenCLIP's, for tests of what is done with them."""

from __future__ import annotations

import json
from pathlib import Path

import open_clip
import torch
import torch.nn.functional as F
from ambiguous_pairs import points

import prolip
from prolip.embeddings import Pairs
from prolip.fitting.attach import attach
from prolip.methods.likelihood import LikelihoodConfig
from prolip.models.checkpoint import save_pretrained
from prolip.uncertainty.fit import Fitted, fit_variances

TINY = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "patch_size": 16, "width": 32, "layers": 1, "head_width": 16},
    "text_cfg": {"context_length": 8, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}
CONFIG = LikelihoodConfig(bank=32, centres=8)


def fitted_model(folder: Path, name: str = "ProLIP-ViT-test", doubts: bool = False) -> str:
    """A small model with variances and novelty, fitted to random pairs.

    doubts: the images of pairs are near their texts, and two changes of each are not: on such the model doubts itself;
    the first eight texts are true of nine images each.
    """
    torch.manual_seed(0)
    save_pretrained(prolip.create_model(name), folder / "plain")
    model = prolip.create_model(name)
    width, first = model.embed_dim, model.config["vision_cfg"]["width"]
    image, text = (F.normalize(torch.randn(64, width), dim=1) for _ in range(2))
    ids = prolip.get_tokenizer(name)([f"picture {i}" for i in range(64)])
    second, rows = model.config["text_cfg"]["width"], torch.arange(64)
    ends = {"image_first": torch.randn(64, 2 * first), "text_first": torch.randn(64, 2 * second)}
    image_of, text_of = (torch.cat([rows, rows]), torch.cat([rows, rows % 8])) if doubts else (rows, rows)
    if doubts:
        image = F.normalize(text + 0.05 * image, dim=1)
        ends |= {"changed": F.normalize(torch.randn(2, 64, width), dim=2), "changed_of": rows}
    pairs = Pairs(image=image, text=text, image_of=image_of, text_of=text_of, scale=10.0, text_ids=ids, **ends)
    attach(f"local-dir:{folder}/plain", None, None, pairs, CONFIG, folder / "fitted")
    return f"local-dir:{folder}/fitted"


def openclip_model(folder: Path) -> tuple[str, str]:
    """Name and weights of a small random model of OpenCLIP's."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ViT-least.json").write_text(json.dumps(TINY))
    open_clip.add_model_config(folder / "ViT-least.json")
    torch.manual_seed(1)
    torch.save(open_clip.create_model("ViT-least").state_dict(), folder / "weights.pt")
    return "ViT-least", str(folder / "weights.pt")


def fitted_openclip(folder: Path) -> str:
    """It with variances of random pairs."""
    image, text = (F.normalize(torch.randn(64, 16), dim=1) for _ in range(2))
    ids = open_clip.get_tokenizer("ViT-B-32", context_length=8)([f"picture {i}" for i in range(64)])
    ends = {"image_first": torch.randn(64, 64), "text_first": torch.randn(64, 64), "changed_of": torch.arange(64)}
    ends |= {"changed": points(128, 16, seed=2).unflatten(0, (2, 64))}
    pairs = Pairs.in_rows(image, text, 10.0, text_ids=ids, **ends)
    attach(*openclip_model(folder / "plain"), None, pairs, CONFIG, folder / "fitted")
    return f"local-dir:{folder}/fitted"


def likely_pairs(images: int = 120, dim: int = 16, kinds: int = 3, ids: bool = False) -> Pairs:
    """Images in twelve topics, each with a text of its own and that of its topic; changes move them more and more, to
    where the pairs are forgotten.
    """
    g = torch.Generator().manual_seed(5)
    topic = torch.arange(images) % 12
    image = F.normalize(0.7 * points(12, dim, seed=6)[topic] + points(images, dim, seed=7), dim=1)
    middle = F.normalize(torch.stack([image[topic == k].mean(0) for k in range(12)]), dim=1)
    text = torch.cat([F.normalize(image + 0.2 * points(images, dim, seed=8), dim=1), middle])
    of = torch.arange(images)
    changed_of = torch.arange(0, images, 2)
    noise = torch.randn(kinds, len(changed_of), dim, generator=g) / dim**0.5
    changed = F.normalize(image[changed_of] + torch.linspace(1, 4, kinds).view(-1, 1, 1) * noise, dim=2)
    first = torch.randn(images, 10, generator=g)
    words = {"text_ids": torch.stack([torch.arange(len(text)), torch.full((len(text),), 499)], 1)} if ids else {}
    return Pairs(
        image=image,
        text=text,
        image_of=torch.cat([of, of]),
        text_of=torch.cat([of, images + topic]),
        scale=12.0,
        image_first=first,
        text_first=torch.randn(len(text), 10, generator=g),
        changed=changed,
        changed_of=changed_of,
        **words,
    )


def likely_model(**sizes) -> tuple[Pairs, Fitted]:
    """The pairs and what was fitted to them."""
    pairs = likely_pairs()
    return pairs, fit_variances(pairs, **{"bank": 64, "centres": 200, "novelty_centres": 32, "readings": 64} | sizes)
