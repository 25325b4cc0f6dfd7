"""Addresses without secrets, in every form that a setting may have, and texts that hold addresses."""

import pytest

from prolip.utils import secrecy

PLAIN = ["data/{000..999}.tar::s3://b/{0..9}.tar", "hf://datasets/a@b/x", "https://h:8080/a@b/x.tar"]
PLAIN += ["https://[::1]:80/x", "file:///a?b#c", "a/b?c", "hf-hub:org/name@rev", "", "name=x|y"]
SECRET = {
    "https://user:SECRET@host/x.tar": "https://host/x.tar",
    "https://SECRET@host/x.tar": "https://host/x.tar",
    "https://user:SE/CR?ET@host/x.tar": "https://host/x.tar",
    "https://u%73er:SE%43RET@host/x.tar?a#b": "https://host/x.tar",
    "https://host/x.tar?X-Amz-Signature=SECRET&a=b": "https://host/x.tar",
    "s3://KEY:SEC/RET@bucket/{00..99}.tar": "s3://bucket/{00..99}.tar",
    "wds:https://u:SECRET@h/x?y": "wds:https://h/x",
    "coco:https://u:SECRET@h/a.json?SECRET,https://u:SECRET@h/im": "coco:https://h/a.json,https://h/im",
    "https://{u1:SECRET1,u2:SECRET2}@host/{000..100}.tar": "https://host/{000..100}.tar",
    "{https://u:SECRET@h/a.tar?SECRET,https://u:SECRET@h/b.tar}": "{https://h/a.tar,https://h/b.tar}",
    "https://h/{1,2}.tar?sig={SECRETA,SECRETB}": "{https://h/1.tar,https://h/2.tar}",
    "https://u:SEC{RET@h/x": "https://h/x",
    "data/a.tar::https://u:SECRET@h/b.tar::c.tar": "data/a.tar::https://h/b.tar::c.tar",
}


@pytest.mark.parametrize("address", PLAIN)
def test_an_address_without_secrets_stays_as_it_is(address):
    nested = {"a": [address, None, 1]}
    assert secrecy.redacted(address) == address and secrecy.redacted(nested) == nested


@pytest.mark.parametrize("address", SECRET)
def test_what_may_be_secret_in_an_address_is_left_out(address):
    assert secrecy.redacted(address) == SECRET[address]
    assert secrecy.redacted(SECRET[address]) == SECRET[address]


def test_of_a_command_a_salted_hash_is_kept_that_only_the_same_command_has(monkeypatch):
    one, other = (secrecy.redacted(f"pipe:curl -H 'Bearer {word}' http://h/x") for word in ("SECRET", "SECRES"))
    assert one != other and one.startswith(f"pipe:sha256={secrecy.salt}-") and "http" not in one
    assert secrecy.redacted(one) == one
    monkeypatch.setattr(secrecy, "salt", "another")
    again = secrecy.redacted("pipe:curl -H 'Bearer SECRET' http://h/x")
    assert again != one
    secrecy.adopt(one.removeprefix("pipe:sha256="))
    assert secrecy.redacted("pipe:curl -H 'Bearer SECRET' http://h/x") == one


def test_texts_about_hidden_addresses_hold_no_secret():
    command = "curl -H 'Authorization: \"Bearer SECRET1\"' http://h/{000..100}.tar"
    for address in (f"pipe:{command}", "https://us%65r:SECRET2@h/x", "https://h/x?sig=SECRET3"):
        secrecy.hide(address)
    one = command.replace("{000..100}", "042")
    for text in (
        one,
        repr(one),
        f"pipe:{command}: broken",
        "user user:SECRET2 is wrong",
        "SECRET2",
        "for url: /x?sig=SECRET3",
        "GET https://any:SECRET9@h/x?y=SECRET9: timed out",
        "Caused by /x/y?token=SECRET9&a (...)",
    ):
        assert "SECRET" not in secrecy.scrub(text), text
    for text in ("did you mean a/b? Then give it", "see https://pytorch.org/docs (now)", "a?b=c", "1 of 2: 50%"):
        assert secrecy.scrub(text) == text


def test_a_command_says_why_it_failed_without_its_own_words():
    command = "curl -u me:SECRET http://h/x | cat /data/y"
    said = secrecy.said_by(command, "curl: (6) not SECRET\ncat: /data/y: No such file")
    assert said == "curl: (6) not ***\ncat: /data/y: No such file"
