"""The hub within reach (played by datasets in memory), out of reach, and only in the cache."""

import json
import shutil
import socket
import time

import datasets
import huggingface_hub
import pytest

from config import DataConfig
from data.corpora import Corpus
from data.network import answers

ROWS = {"text": ["one", None, "two", "", "three"], "n": [1, 2, 3, 4, 5]}


def read(**settings):
    config = DataConfig(source="hub", name="org/name", **settings)
    return [tuple(document) for document in Corpus(config).documents()]


@pytest.fixture
def online(monkeypatch):
    """Whoever runs the tests may have set HF_HUB_OFFLINE."""
    for switch in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(switch, "HF_HUB_OFFLINE", False)


@pytest.fixture
def server(monkeypatch):
    """A listening port of this machine, which no proxy stands before."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture
def reachable_hub(online, server, monkeypatch):
    """A hub that holds ROWS. Returns the calls of load_dataset."""
    calls = []

    def load_dataset(*where, **rest):
        calls.append((where, rest))
        return datasets.Dataset.from_dict(ROWS)

    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", f"http://{server}")
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return calls


@pytest.fixture
def unreachable_hub(online, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", "https://no-such-host.invalid")


def test_rows_become_documents(reachable_hub):
    assert read(subset="s", split="validation") == [
        ("0", "one"),
        ("2", "two"),
        ("4", "three"),
    ]
    assert reachable_hub == [(("org/name", "s"), {"split": "validation"})]


def test_missing_column_lists_the_columns(reachable_hub):
    with pytest.raises(ValueError, match=r"data\.name=org/name.*data\.field=body.*text, n"):
        read(field="body")


def test_an_answer_of_the_hub_is_passed_on(reachable_hub, monkeypatch):
    def refuse(*_, **__):
        raise ValueError("Unknown split 'tset'. Should be one of ['train', 'test'].")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(ValueError, match=r"data\.name=org/name .*data\.split=tset.*'train'"):
        read(split="tset")


def test_a_stream_that_breaks_off_is_no_end(reachable_hub, monkeypatch):
    class BreaksOff:
        def __iter__(self):
            yield {"text": "one"}
            raise ConnectionError("reset by peer")

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: BreaksOff())
    with pytest.raises(ValueError, match=r"data\.name=org/name.*row 1 .*reset by peer"):
        read()


def test_out_of_reach_names_the_way_out_at_once(unreachable_hub):
    """Left alone, datasets retries for 25 seconds."""
    start = time.perf_counter()
    with pytest.raises(ValueError, match=r"data\.name=org/name.*no-such-host.*HF_HUB_OFFLINE=1"):
        read()
    assert time.perf_counter() - start < 3


@pytest.fixture
def offline(monkeypatch):
    """What HF_HUB_OFFLINE=1 sets at import."""
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: pytest.fail("it was tried"))
    for switch in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(switch, "HF_HUB_OFFLINE", True)


def test_offline_by_choice_does_not_try_the_network(offline):
    with pytest.raises(ValueError, match=r"data\.name=org/name .*[Oo]ffline"):
        read()


def test_cached_dataset_is_read_without_network(offline, tmp_path, monkeypatch):
    """The cache folder is laid out as an earlier download of org/name would have left it."""
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in ("one", "two"))
    )
    table = datasets.load_dataset(
        "json",
        data_files=str(tmp_path / "rows.jsonl"),
        split="train",
        cache_dir=str(tmp_path / "built"),
    )
    built = next(file for file in (tmp_path / "built").rglob("*.arrow")).parent
    download = tmp_path / "cache" / "org___name" / "default" / "0.0.0" / "0123"
    shutil.copytree(built, download)
    (download / "json-train.arrow").rename(download / "name-train.arrow")
    info = json.loads((download / "dataset_info.json").read_text()) | {
        "dataset_name": "name",
        "config_name": "default",
    }
    (download / "dataset_info.json").write_text(json.dumps(info))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    assert read() == [("0", "one"), ("1", "two")] and len(table) == 2


def test_a_listening_server_answers(server):
    assert answers(f"http://{server}/file")


def test_a_closed_port_does_not(server):
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = gone.getsockname()[1]
    assert not answers(f"http://127.0.0.1:{address}")


@pytest.mark.parametrize("proxy", ["http://{}", "{}"], ids=["with-scheme", "without-scheme"])
def test_behind_a_proxy_the_proxy_is_asked(server, monkeypatch, proxy):
    monkeypatch.setenv("https_proxy", proxy.format(server))
    assert answers("https://no-such-host.invalid")
    monkeypatch.setenv("no_proxy", "no-such-host.invalid")
    assert not answers("https://no-such-host.invalid")


def test_a_name_server_that_hangs_is_left_behind(monkeypatch):
    """Name look-up has no timeout: on a closed network it can hang for half a minute."""

    def hang(*_, **__):
        time.sleep(3)
        raise OSError

    monkeypatch.setattr(socket, "create_connection", hang)
    start = time.perf_counter()
    assert not answers("https://example.org", timeout=0.2)
    assert time.perf_counter() - start < 2
