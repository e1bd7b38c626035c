"""The hub within reach (played by datasets in memory), out of reach, and only in the cache."""

import socket
import threading

import datasets
import pytest

from config import DataConfig
from data.corpora import Corpus
from data.network import answers

NOBODY = "http://127.0.0.1:1"  # a port at which nobody listens
ROWS = {"text": ["one", None, "two", "", "three"], "n": [1, 2, 3, 4, 5]}


def read(**settings):
    config = DataConfig(source="hub", name="org/name", **settings)
    return [tuple(document) for document in Corpus(config).documents()]


@pytest.fixture
def server(monkeypatch):
    """A listening port of this machine, which no proxy stands before."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture
def hub(server, monkeypatch):
    """Call it with the rows that the hub answers with, or an error. Returns what it was asked."""
    asked = []
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", f"http://{server}")

    def holds(rows):
        def load_dataset(*where, **rest):
            asked.append((where, rest))
            if isinstance(rows, Exception):
                raise rows
            return rows

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return asked

    return holds


def test_rows_become_documents(hub):
    asked = hub(datasets.Dataset.from_dict(ROWS))
    expected = [("0", "one"), ("2", "two"), ("4", "three")]
    assert read(subset="s", split="validation") == expected
    assert asked == [(("org/name", "s"), {"split": "validation"})]


def breaks_off():
    yield {"text": "one"}
    raise ConnectionError("reset by peer")


REFUSED = {
    "no-column": (datasets.Dataset.from_dict(ROWS), r"row 0 .*data\.field=body.*text, n"),
    "breaks-off": (breaks_off(), r"row 1 .*reset by peer"),
    "no-split": (ValueError("should be one of 'train'"), r"data\.split=tset.*'train'"),
    "a-script": (RuntimeError("scripts are not supported"), "scripts are not supported"),
}


@pytest.mark.parametrize("rows, message", REFUSED.values(), ids=REFUSED)
def test_an_answer_of_the_hub_is_passed_on(hub, rows, message):
    hub(rows)
    field = "body" if "body" in message else "text"
    with pytest.raises(ValueError, match=rf"data\.name=org/name .*{message}"):
        read(split="tset", field=field)


def test_out_of_reach_names_the_way_out_and_is_not_asked(hub, monkeypatch):
    """datasets alone would retry for 25 seconds."""
    asked = hub(datasets.Dataset.from_dict(ROWS))
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", NOBODY)
    with pytest.raises(ValueError, match=rf"data\.name=org/name.*{NOBODY}.*HF_HUB_OFFLINE=1"):
        read()
    assert asked == []


def test_offline_the_cache_is_read_and_nobody_asked(hub, monkeypatch):
    asked = hub(datasets.Dataset.from_dict(ROWS))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: pytest.fail("it was tried"))
    assert len(read()) == 3 and len(asked) == 1


def test_a_server_or_its_proxy_answers_and_a_closed_port_does_not(server, monkeypatch):
    assert answers(f"http://{server}/file", timeout=60)  # where a core is shared, a second is short
    assert not answers(NOBODY)
    for proxy in (f"http://{server}", server):
        monkeypatch.setenv("http_proxy", proxy)
        assert answers(NOBODY, timeout=60)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert not answers(NOBODY)


def test_a_name_server_that_hangs_is_left_behind(monkeypatch):
    """Name look-up has no timeout: on a closed network it can hang for half a minute."""
    left = threading.Event()

    def hangs(*_, **__):
        left.wait(60)
        return socket.socket()

    monkeypatch.setattr(socket, "create_connection", hangs)
    assert not answers("https://example.org", timeout=0.2)
    left.set()
