"""A token store is damaged before a run, or while the run reads it.

The run gives the same result as with a whole store, or ends with one line and a summary.
"""

import os
import random
import shutil

import pytest

from data.batches import TextData
from tests.command import checkpoint, computed, run, same, summary, tiny


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Overrides that name a corpus of forty texts, and an undisturbed run on it."""
    folder = tmp_path_factory.mktemp("damaged")
    words = random.Random(0)
    (folder / "corpus").mkdir()
    for number in range(40):
        (folder / "corpus" / f"{number}.txt").write_text(
            " ".join(words.choices(["if", "else", "for", "in", "return", "None"], k=100))
        )
    overrides = (
        "data=text",
        f"data.path={folder}/corpus",
        "data.val_fraction=0.2",
        "steps=8",
        "eval_every=4",
        "checkpoint_every=2",
    )
    done = run(*tiny(folder / "straight", *overrides), TILEGPT_CACHE=str(folder / "cache"))
    assert done.code == 0, done.output
    assert "token store checked: 0." in done.output
    return overrides, folder / "straight"


@pytest.fixture
def cache(corpus, tmp_path):
    """A cache folder with the corpus' store in it."""
    _, straight = corpus
    return shutil.copytree(straight.parent / "cache", tmp_path / "cache")


def file_of(cache, name):
    (file,) = cache.glob(f"text-*/{name}")
    return file


def undisturbed(run_dir, straight):
    return same(checkpoint(run_dir), checkpoint(straight)) and computed(run_dir) == computed(
        straight
    )


DAMAGE = {
    "zeros": lambda cache: file_of(cache, "train.bin").write_bytes(
        bytes(file_of(cache, "train.bin").stat().st_size)
    ),
    "no-such-token": lambda cache: file_of(cache, "train.bin").write_bytes(
        b"\xff" * file_of(cache, "train.bin").stat().st_size
    ),
    "validates-on-training-data": lambda cache: file_of(cache, "val.bin").write_bytes(
        file_of(cache, "train.bin").read_bytes()[: file_of(cache, "val.bin").stat().st_size]
    ),
    "meta": lambda cache: file_of(cache, "meta.json").write_text("[]"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_store_that_was_damaged_before_the_run(corpus, cache, tmp_path, damage):
    """A regression test: it trained on the damaged tokens, or ended with a traceback."""
    overrides, straight = corpus
    damage(cache)
    done = run(*tiny(tmp_path / "run", *overrides), TILEGPT_CACHE=str(cache))
    assert (
        done.code == 0
        and done.output.count("it is built again") == 1
        and "Traceback" not in done.output
    )
    assert undisturbed(tmp_path / "run", straight)
    assert summary(tmp_path / "run")["data"] == summary(straight)["data"]


HARM = {
    "truncated": (lambda file: os.truncate(file, 100), "it became shorter than its"),
    "overwritten": (
        lambda file: file.write_bytes(b"\xff" * file.stat().st_size),
        "it holds token 65535, and there are 257",
    ),
}


@pytest.mark.parametrize("harm, said", HARM.values(), ids=HARM)
def test_a_store_that_is_damaged_under_the_run(corpus, cache, tmp_path, monkeypatch, harm, said):
    """A regression test: SIGBUS ended the run without a summary.

    Or PyTorch said "index out of range in self".
    """
    overrides, straight = corpus
    train_batch = TextData.train_batch

    def patched(self, step, num_sequences):
        if step == 5 and not pending.pop():
            harm(file_of(cache, "train.bin"))
        return train_batch(self, step, num_sequences)

    pending = [True, False]  # from behind: at the first reading of that step alone
    monkeypatch.setattr(TextData, "train_batch", patched)
    failed = run(*tiny(tmp_path / "run", *overrides), TILEGPT_CACHE=str(cache))
    complaint = failed.complaint()
    assert (
        str(file_of(cache, "train.bin")) in complaint
        and said in complaint
        and f"resume={tmp_path}/run" in complaint
    )
    assert (
        summary(tmp_path / "run")["status"] == "failed"
        and said in summary(tmp_path / "run")["error"]
    )

    resumed = run(f"resume={tmp_path}/run", TILEGPT_CACHE=str(cache))
    assert resumed.code == 0 and "it is built again" in resumed.output
    assert summary(tmp_path / "run")["status"] == "completed" and undisturbed(
        tmp_path / "run", straight
    )
