"""A run on data whose addresses hold secrets: nothing that it writes or prints holds one."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import re
import shutil
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from training_runs import TINY

from drawings import FOLDER
from prolip.cli.main import main as command_line
from prolip.data.reading.shard_index import read_index
from prolip.data.reading.shards import expand_shards
from training.checkpoint.files import load_checkpoint
from training.main import main

SECRET = "hUsh4711"
ENCODED = "hU%73h4711"


class Guarded(SimpleHTTPRequestHandler):
    """Files below /open are for all, those below /auth for user:SECRET, those below /bearer for a token."""

    def do_GET(self):
        kind, _, self.path = self.path.lstrip("/").partition("/")
        wanted = {"auth": "Basic " + base64.b64encode(f"user:{SECRET}".encode()).decode(), "bearer": f"Bearer {SECRET}"}
        if kind in wanted and self.headers.get("Authorization") != wanted[kind]:
            self.send_error(401)
        else:
            super().do_GET()

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    for name in ("noto", "twemoji", "emojione"):
        shutil.copy(FOLDER / f"{name}.tar", folder)
    (folder / "cut.tar").write_bytes((FOLDER / "noto.tar").read_bytes()[:3000])
    words = ["--select", "subgroup=sport", "--classes", "subgroup", "--output", str(folder / "wds_sport")]
    assert command_line(["data", "emoji", "--data", str(FOLDER / "emojione.tar"), *words]) == 0
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Guarded, directory=str(folder))) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def sources(host: str) -> str:
    """Addresses of every kind, good shards and bad ones."""
    bearer = f"curl -sf -H 'Authorization: Bearer {SECRET}' http://{host}/bearer"
    return "::".join(
        [
            f"http://user:{SECRET}@{host}/auth/{{noto,twemoji}}.tar",
            f"http://user:{ENCODED}@{host}/auth/noto.tar?X-Amz-Signature={SECRET}#{SECRET}",
            f"{{http://user:{SECRET}@{host}/auth/cut.tar,http://{host}/open/gone.tar?sig={SECRET}}}",
            f"http://user:not{SECRET}@{host}/auth/noto.tar",
            f"pipe:{bearer}/{{noto,twemoji}}.tar",
            f"pipe:{bearer}/gone.tar",
            f"pipe:echo 'no {SECRET} token={SECRET}' >&2; exit 3",
            f'pipe:echo "{SECRET}',
        ]
    )


def settings(folder: Path, host: str, name: str = "run") -> list[str]:
    more = "--caption-sampling name --train-num-samples 32 --max-bad-fraction 1 --shuffle-buffer 1 --read-retries 0"
    more += f" --save-frequency 0 --output {folder} --name {name}"
    return [*TINY[TINY.index("--model") :], *more.split()]


def contents(path: Path):
    data = path.read_bytes()
    yield data
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            yield from map(archive.read, archive.namelist())


def found_in(data: bytes) -> bool:
    forms = (SECRET, ENCODED, base64.b64encode(f"user:{SECRET}".encode()).decode())
    return any(form.encode() in data for form in forms)


def leaks(folder: Path) -> list[str]:
    return [str(path) for path in sorted(folder.rglob("*")) if path.is_file() and any(map(found_in, contents(path)))]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, host):
    """The folder of a run that has ended, and what it printed."""
    folder, printed = tmp_path_factory.mktemp("trained"), io.StringIO()
    more = f"--epochs 6 --ledger --val-data emoji:http://user:{SECRET}@{host}/auth/emojione.tar?sig={SECRET} "
    more += f"wds:http://user:{ENCODED}@{host}/auth/wds_sport --val-select subgroup=sport"
    words = ["--train-data", sources(host), *settings(folder, host), *more.split()]
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        assert main(words) == 0
    return folder, printed.getvalue()


def test_a_run_writes_and_prints_no_secret(trained, host):
    folder, printed = trained
    assert leaks(folder) == [] and not found_in(printed.encode())
    config = json.loads((folder / "run/config.json").read_text())
    first, second, *_, last = config["data"]["train_data"].split("::")
    assert first == f"{{http://{host}/auth/noto.tar,http://{host}/auth/twemoji.tar}}" and "***" not in printed
    assert second == f"http://{host}/auth/noto.tar" and re.fullmatch(r"pipe:sha256=[0-9a-f]{16}-[0-9a-f]{24}", last)
    assert set(config["redacted"]) == {"data.train_data", "val.val_data"}
    assert "sport/acc1" in json.loads((folder / "run/eval.json").read_text())
    faults = load_checkpoint(max((folder / "run/checkpoints").iterdir()))["data"]["faults"]["total"]
    assert {"unreadable shard", "broken shard"} <= set(faults["kinds"]) and len(faults["examples"]) == 5


def test_a_resume_asks_for_the_address_again_and_refuses_another_one(trained, tmp_path, host, capfd):
    shutil.copytree(trained[0] / "run", run := tmp_path / "run")
    saved = ["--config", str(run / "config.json"), "--resume", "auto", "--epochs", "7", "--output", str(tmp_path)]
    assert main(saved) == 2
    assert "give --train-data again" in capfd.readouterr().err
    rest = ["--val-data", "--val-select", "none"]
    other = sources(host).replace(f"sig={SECRET}", "sig=another4712")
    assert main([*saved, "--train-data", other, *rest]) == 2
    said = capfd.readouterr().err
    assert "--train-data: the address differs from the checkpoint's" in said and "another4712" not in said


@pytest.mark.slow
def test_a_resume_goes_on_with_the_same_address_and_on_request_with_a_renewed_one(trained, tmp_path, host, capfd):
    shutil.copytree(trained[0] / "run", run := tmp_path / "run")
    saved = ["--config", str(run / "config.json"), "--output", str(tmp_path)]
    saved += ["--resume", "auto", "--val-data", "--val-select", "none"]
    assert main([*saved, "--epochs", "7", "--train-data", sources(host)]) == 0
    said = capfd.readouterr().out
    assert "resuming from" in said and "data.train_data" not in said
    other = sources(host).replace(f"sig={SECRET}", "sig=another4712")
    assert main([*saved, "--epochs", "8", "--train-data", other, "--renewed-addresses"]) == 0
    assert leaks(tmp_path) == []


@pytest.mark.parametrize(
    "data",
    [
        "http://user:not{}@HOST/auth/noto.tar",
        "pipe:echo no {} >&2; exit 3",
        "http://{}@HOST/open/x.zip",
        "s3://key:{}/+@bucket/x*.tar",
        "coco:http://u:{}@HOST/x.json?{},http://u:{}@HOST",
        "http://u:{}@HOST/x.csv",
    ],
)
def test_errors_about_an_address_hold_no_secret(data, host, tmp_path, capfd):
    data = data.replace("HOST", host).format(SECRET, SECRET, SECRET)
    words = settings(tmp_path, host)
    words[words.index("--max-bad-fraction") + 1] = "0"
    assert main(["--train-data", data, *words, "--epochs", "1"]) == 2
    said = "".join(capfd.readouterr())
    assert "error: " in said and not found_in(said.encode()), said
    assert leaks(tmp_path) == []


def test_an_index_holds_no_secret_and_counts_for_the_same_addresses(host, tmp_path, capfd):
    place = tmp_path / "index.json"
    shards = [
        f"http://user:{SECRET}@{host}/auth/noto.tar",
        f"http://{host}/open/twemoji.tar?sig={SECRET}",
        f"pipe:curl -sf -H 'Authorization: Bearer {SECRET}' http://{host}/bearer/{{noto,twemoji}}.tar",
    ]
    assert command_line(["data", "index", *shards, "--output", str(place), "--processes", "0"]) == 0
    urls = [shard.url for source in shards for shard in expand_shards(source, pipes=True)]
    found = read_index(str(place))
    assert found.only(urls, {})[1] == sum(found[url].samples for url in urls) > 0
    with pytest.raises(ValueError, match="no entry"):
        found["pipe:another"]
    twice = [f"http://{host}/open/noto.tar?part={part}" for part in (1, 2)]
    assert command_line(["data", "index", *twice, "--output", str(tmp_path / "other.json")]) == 2
    assert leaks(tmp_path) == [] and not found_in("".join(capfd.readouterr()).encode())
