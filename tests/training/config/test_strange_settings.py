"""Strange values in a --config file: the run that is meant, or one line that names the setting."""

import dataclasses
import json
import math
import random
from collections import Counter

import yaml

from training.config import section_types
from training.main import parse

NUMBERS = [0, -1, 1, 3, 1.5, -0.5, 10**9, 2**63, 10**400, float("nan"), float("inf"), -float("inf"), 1e300]
TEXTS = ["", "false", "12", "nan", "1e400", "x" * 100_000, "a\nb"]
STRANGE = [None, True, False, *NUMBERS, *TEXTS, [], [1, 2], ["a", None], [[]], {}, {"a": {"b": [1]}}]


def leaves(value):
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else None
    return [value] if parts is None else [leaf for part in parts for leaf in leaves(part)]


def try_one(folder, seed):
    """What becomes of one generated setting: "taken" or "refused"."""
    rng = random.Random(f"setting {seed}")
    method = rng.choice(["prolip", "siglip", "clip"])
    section, config = rng.choice(list(section_types(method).items()))
    name = rng.choice([field.name for field in dataclasses.fields(config)] or ["none"])
    name += rng.choice(["", "", "", "", "", "x"])
    value = rng.choice(STRANGE)
    values = {"method": method, section: {name: value}}
    if rng.random() < 0.1:
        values = rng.choice([{section: value}, {"method": value}, {name: value}, [value], value])
    is_json = rng.random() < 0.5
    path = folder / ("c.json" if is_json else "c.yaml")
    path.write_text(json.dumps(values) if is_json else yaml.safe_dump(values))
    try:
        made = parse(["--config", str(path)])
    except ValueError as error:
        line = str(error)
        assert "\n" not in line.strip() and len(line) < 1500, line[:3000]
        stem = name.removesuffix("x")
        known = (stem, stem.replace("_", "-"), section, path.name, "method")
        assert any(word in line for word in known), (name, line)
        return "refused"
    assert all(math.isfinite(leaf) for leaf in leaves(made.to_dict()) if isinstance(leaf, float)), (name, value)
    got = getattr(getattr(made, section), name, None) if isinstance(values, dict) and section in values else value
    same = got == value or (isinstance(value, str) and isinstance(got, float)) or isinstance(value, list)
    before = name == "val_data" and got == (f"emoji:{value}",)  # a text is what earlier versions wrote
    assert same or before or name == "csv_separator", (section, name, value, got)
    return "taken"


def test_sixty_strange_settings_are_taken_as_meant_or_refused_in_a_line(tmp_path):
    verdicts = Counter(try_one(tmp_path, seed) for seed in range(60))
    assert verdicts["refused"] > 25 and verdicts["taken"] > 3, verdicts
