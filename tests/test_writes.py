"""All files that src writes permanently go through prolip.utils.outputs: complete under their name or absent."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
#: Methods and functions that write a file by its name; `save` is NumPy's, PyTorch's, Pillow's and Matplotlib's.
WRITING = {"write_text", "write_bytes", "savefig", "savez", "savez_compressed", "save_file", "tofile", "to_csv"}
WRITING |= {"copyfile", "copy", "copy2", "move", "to_parquet", "TarWriter", "ShardWriter"}
SAVING = {"np", "torch", "picture", "program"}
#: What is called with a file or a folder that the caller commits, or adds to a file line by line.
ALLOWED = {
    "prolip.curate.tables:write_table": "the caller's file",
    "prolip.curate.tables:write_words": "the caller's file",
    "prolip.data.reading.shard_index:write_index": "object stores show an object once it is complete",
    "prolip.data.noisy_captions:write": "the caller's file",
    "prolip.evaluation.datasets.write:write_shards": "the caller's folder",
    "prolip.evaluation.datasets.write:write_split": "the caller's folder",
    "prolip.evaluation.suites.datacomp.results:append": "a line, under a lock; readers skip a half one",
    "prolip.evaluation.suites.datacomp.results:alone": "a lock",
    "prolip.evaluation.suites.datacomp.run:run": "nothing is written",
    "prolip.export:write": "the caller's folder",
    "prolip.models.tokenizer:save_pretrained": "the caller's folder",
    "prolip.fitting.attach:write_openclip": "the caller's folder",
    "prolip.utils.outputs:_link": "the new folder",
    "prolip.utils.outputs:lock": "a lock",
    "training.checkpoint.files:fill": "the file of Storage.write",
    "training.checkpoint.run_dir:__init__": "the ledger: lines",
    "training.checkpoint.files:write": "another name, until a move",
    "training.health.log:open": "the log: lines",
}


def writes(call: ast.Call) -> bool:
    """Return whether a call writes a file by its name."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name == "save":
        of = function.value if isinstance(function, ast.Attribute) else None
        return ast.unparse(of).split(".")[0] in SAVING if of is not None else False
    if name in ("copy", "write_table"):
        return isinstance(function, ast.Attribute) and ast.unparse(function.value) in ("shutil", "pq")
    if name == "savefig":
        return ast.unparse(call.args[0]) != "buffer"
    if name == "open":
        words = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
        modes = [word.value for word in words if isinstance(word, ast.Constant) and isinstance(word.value, str)]
        return any(set(mode) <= set("rwaxbt+") and set(mode) & set("wax") for mode in modes)
    return name in WRITING


def bare(node: ast.AST, function: str = "", inside: bool = False) -> Iterator[tuple[str, int]]:
    """(function, line) of each write that is in no `with replacing(...)` and no `with replacing_folder(...)`."""
    for child in ast.iter_child_nodes(node):
        here, held = function, inside
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            here, held = child.name, False
        elif isinstance(child, (ast.With, ast.AsyncWith)):
            held |= any("replacing" in ast.unparse(item.context_expr) for item in child.items)
        elif isinstance(child, ast.Call) and writes(child) and not inside:
            yield function, child.lineno
        yield from bare(child, here, held)


def test_every_file_is_written_by_one_rename():
    found = {}
    for path in SOURCE.rglob("*.py"):
        module = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        found |= {f"{module}:{function}": line for function, line in bare(ast.parse(path.read_text()))}
    assert {name: line for name, line in found.items() if name not in ALLOWED} == {}
    assert ALLOWED.keys() - found.keys() == set(), "these write nothing any more"
