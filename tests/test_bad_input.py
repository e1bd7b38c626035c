"""Whatever a user gets wrong: one line that names the value and the way out, and nothing lost.

The exit code is not 0.
"""

import errno
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.command import (
    ROOT,
    TINY,
    checkpoint,
    contents,
    index,
    metrics,
    run,
    same,
    summary,
    tiny,
    tiny_sweep,
)
from training.device import pick_dtype

linux = pytest.mark.skipif(sys.platform != "linux", reason="the obstacle is Linux's")
BACKENDS_OF_A_USER = "attention.target=tests.user_backends:"


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("finished")
    assert run(*tiny(run_dir)).code == 0
    return run_dir


@pytest.fixture
def run_dir(finished, tmp_path) -> Path:
    """A finished run of four steps, for tests to damage."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file grows beyond that many bytes: as on a full disk, writing fails."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# overrides, and what the answer must contain: the value and the way out
REFUSED = {
    "attention": (["attention=naiv"], ["no attention 'naiv'; did you mean naive?", "no_rescale"]),
    "model": (["model=huge"], ["model=huge: there is no model 'huge'", "gpt2_medium"]),
    "data": (["data=wiki"], ["no data 'wiki'", "stdlib", "last_write"]),
    "experiment": (["experiment=everything"], ["no experiment 'everything'", "break_it"]),
    "choice-null": (["model=null"], ["no model 'null'"]),
    "key": (["sead=1"], ["sead=1: there is no key 'sead'; did you mean seed?"]),
    "key-of-a-group": (
        ["attention.block_k=4"],
        ["no key 'attention.block_k'; did you mean attention.block_kv?"],
    ),
    "key-without-its-group": (["lr=1e-3"], ["no key 'lr'; did you mean optim.lr?"]),
    "key-like-no-other": (["xyz=1"], ["no key 'xyz'; python train.py --cfg job shows all keys"]),
    "key-with-dashes": (["--eval_every=20"], ["write eval_every=20, without dashes"]),
    "key-with-plus": (["+sead=1"], ["no key 'sead'; did you mean seed?"]),
    "seq_len-0": (["seq_len=0"], ["seq_len=0 must be at least 1"]),
    "seq_len-negative": (["seq_len=-8"], ["seq_len=-8 must be at least 1"]),
    "seq_len-fraction": (["seq_len=1.5"], ["seq_len=1.5", "Integer"]),
    "seq_len-word": (["seq_len=long"], ["seq_len=long", "Integer"]),
    "seq_len-beyond-positions": (
        ["model.max_seq_len=16"],
        ["seq_len=32", "model.max_seq_len=16", "leave model.max_seq_len unset"],
    ),
    "num_layers": (
        ["model.num_layers=100000000"],
        ["model.num_layers=100000000 must be at most 10000"],
    ),
    "num_heads": (["model.num_heads=3"], ["model.hidden_size=32", "model.num_heads=3"]),
    "num_kv_heads": (["model.num_kv_heads=3"], ["model.num_heads=2", "model.num_kv_heads=3"]),
    "tokens_per_step": (["tokens_per_step=100"], ["tokens_per_step=100", "4 * 32 = 128"]),
    "learning-rate-nan": (["optim.lr=nan"], ["optim.lr=nan"]),
    "learning-rate-infinite": (["optim.lr=inf"], ["optim.lr=inf"]),
    "init_std": (["model.init_std=-1"], ["model.init_std=-1"]),
    "rope_theta": (["model.positions=rope", "model.rope_theta=0"], ["model.rope_theta=0"]),
    "dtype": (["dtype=fp8"], ["dtype=fp8", "bf16"]),
    "softmax_dtype": (
        ["attention.softmax_dtype=fp8"],
        ["softmax_dtype", "fp8", "float32", "input"],
    ),
    "device": (["device=tpu"], ["device=tpu", "cuda"]),
    "block_kv-word": (
        [
            "attention.switch_at=2",
            "attention.switch_to=tiled",
            "+attention.switch_options.block_kv=abc",
        ],
        ["attention.switch_to=tiled: block_kv=abc must be a whole number"],
    ),
    "block_q": (["attention.block_q=0"], ["attention.block_q=0 must be at least 1"]),
    "block_kv": (
        ["attention=no_rescale", "attention.block_kv=-1"],
        ["attention.block_kv=-1 must be at least 1"],
    ),
    "more-ranks-than-tokens": (  # it took minutes, and all memory
        ["attention=ring", "attention.ranks=1000"],
        ["attention=ring with ranks=1000", "seq_len=32", "choose ranks=32 or fewer"],
    ),
    "option-it-lacks": (
        ["attention=naive", "attention.block_q=8"],
        ["attention=naive", "block_q=8", "no options"],
    ),
    "sdpa-kernel": (
        ["attention=sdpa", "attention.backend=fastest"],
        ["backend=fastest", "efficient"],
    ),
    "sdpa-kernel-it-lacks": (
        ["attention=sdpa", "attention.backend=cudnn"],
        ["attention=sdpa", "cudnn", "attention.backend=auto"],
    ),
    "flex": (["attention=flex"], ["attention=flex", "attention=tiled"]),
    "head_dim": (
        ["attention=triton", "model.hidden_size=1024"],
        ["attention=triton", "head_dim", "512", "1, 257"],
    ),
    "custom-without-target": (
        ["attention=custom"],
        ["attention=custom", "attention.target=pkg.module:BACKEND"],
    ),
    "target-without-custom": (
        ["attention.target=no.such:X"],
        ["attention.target=no.such:X has no effect", "add attention=custom"],
    ),
    "own-no-module": (["attention=no.such:X"], ["attention=no.such:X", "No module named"]),
    "data-path": (
        ["data.path=books"],
        ["data.path=books has no effect: data=stdlib does not read it", "add data=text"],
    ),
    "data-name": (["data.name=org/name"], ["data.name=org/name has no effect", "add data=hub"]),
    "data-field": (["data.field=body"], ["data.field=body has no effect", "data=text or data=hub"]),
    "momentum": (
        ["optim.momentum=0.5"],
        ["optim.momentum=0.5 has no effect: optim=adamw", "add optim=muon"],
    ),
    "rope_theta-without-rope": (
        ["model.rope_theta=500"],
        ["model.rope_theta=500.0 has no effect", "add model.positions=rope"],
    ),
    "min_lr-of-a-constant": (
        ["optim.schedule=constant", "optim.min_lr=0"],
        ["optim.min_lr=0.0 has no effect", "optim.schedule=cosine"],
    ),
    "min_lr-above-lr": (
        ["optim.min_lr=10"],
        ["optim.min_lr=10.0 is above optim.lr=0.012", "lower it, or leave it out"],
    ),
    "tokenizer-of-no-text": (
        ["data=last_write", "tokenizer=bpe"],
        ["tokenizer.name=bpe has no effect: data=last_write", "data=text"],
    ),
    "own-option": (
        ["attention=tests.user_backends:RIGHT", "+attention.options.a=2"],
        ["attention.options.a=2 has no effect"],
    ),
    "target-no-module": (
        ["attention=custom", "attention.target=no.such:X"],
        ["attention=no.such:X", "No module named"],
    ),
    "target-no-name": (
        ["attention=custom", "attention.target=no.such"],
        ["attention=no.such", "pkg.module:NAME"],
    ),
    "target-no-backend": (
        ["attention=custom", BACKENDS_OF_A_USER + "naive"],
        ["tests.user_backends:naive", "attention.Backend"],
    ),
    "dtype-a-backend-lacks": (
        ["attention=custom", BACKENDS_OF_A_USER + "RIGHT_IN_FP32", "dtype=fp16"],
        ["float16", "float32"],
    ),
    "user-shape": (
        ["attention=custom", BACKENDS_OF_A_USER + "WRONG_SHAPE"],
        ["attention=tests.user_backends:WRONG_SHAPE", "must return out of shape"],
    ),
    "user-dtype": (
        ["attention=custom", BACKENDS_OF_A_USER + "WRONG_DTYPE"],
        ["attention=tests.user_backends:WRONG_DTYPE", "float64"],
    ),
    "user-nan": (
        ["attention=custom", BACKENDS_OF_A_USER + "NAN"],
        ["attention=tests.user_backends:NAN", "NaN"],
    ),
    "user-bare-tensor": (
        ["attention=custom", BACKENDS_OF_A_USER + "BARE_TENSOR"],
        ["attention=tests.user_backends:BARE_TENSOR", "AttentionOutput(out, lse)"],
    ),
    "user-no-gradient": (
        ["attention=custom", BACKENDS_OF_A_USER + "NO_GRADIENT"],
        ["attention=tests.user_backends:NO_GRADIENT", "gradient"],
    ),
    "user-not-causal": (
        ["attention=custom", BACKENDS_OF_A_USER + "NOT_CAUSAL"],
        ["attention=tests.user_backends:NOT_CAUSAL is not causal"],
    ),
    "user-wrong": (
        ["attention=custom", BACKENDS_OF_A_USER + "WRONG"],
        ["attention=tests.user_backends:WRONG says exact=True", "declare exact=False"],
    ),
    "user-raises": (
        ["attention=custom", BACKENDS_OF_A_USER + "RAISES"],
        ["attention=tests.user_backends:RAISES", "my kernel's table", "user_backends.py"],
    ),
    "user-exits": (
        ["attention=custom", BACKENDS_OF_A_USER + "EXITS"],
        ["attention=tests.user_backends:EXITS", "SystemExit: 3", "user_backends.py, line"],
    ),
    "user-ctrl-c": (
        ["attention=custom", BACKENDS_OF_A_USER + "PRESSES_CTRL_C"],
        [
            "KeyboardInterrupt() was raised in",
            "user_backends.py, line",
            "raise an exception of another type",
        ],
    ),
    "seed-of-65-bits": (
        ["seed=18446744073709551616"],
        ["seed=18446744073709551616 is not a 64-bit integer", "less than 2**63"],
    ),
    "seed-negative": (["seed=-1"], ["seed=-1 must be at least 0"]),
    "batch_size-of-80-bits": (
        ["batch_size=1000000000000000000000000"],
        ["batch_size=1000000000000000000000000 is not a 64-bit integer"],
    ),
    "option-of-65-bits": (
        ["attention.block_q=18446744073709551616"],
        ["attention.block_q=18446744073709551616 is not a 64-bit integer"],
    ),
    "resolver": (
        ["seed=${nope:1}"],
        ["seed=${nope:1}: Unsupported interpolation type nope; write the value itself"],
    ),
    "interpolation": (
        ["attention.block_q=${nope}"],
        ["attention.block_q=${nope}: Interpolation key 'nope' not found"],
    ),
    "syntax": (
        ["attention=tiled:block_q={a: ["],
        ["cannot read 'attention=tiled:block_q={a: ['", "write 'attention="],
    ),
    "options-as-the-scripts-take-them": (
        ["attention=tiled:block_q=16,block_kv=8"],
        ["write attention=tiled attention.block_q=16 attention.block_kv=8"],
    ),
    "a-list-as-the-scripts-take-it": (
        ["-m", "attention=naive,tiled:block_q=16,block_kv=8"],
        [
            "write -m 'hydra.sweeper.variants.naive={attention:naive}' "
            "'hydra.sweeper.variants.tiled_block_q_16_block_kv_8={attention:tiled,"
            "attention.block_q:16,attention.block_kv:8}'"
        ],
    ),
    "own-options-as-the-scripts-take-them": (
        ["attention=mine:BACKEND:floor=1e-3"],
        ["write attention=mine:BACKEND +attention.options.floor=1e-3"],
    ),
    "own-option-without-plus": (
        ["attention=mine:BACKEND", "attention.options.block_q=32"],
        ["error: there is no attention.options.block_q yet to change: write +attention.options."],
    ),
    "removed": (["~seed"], ["~seed removes a setting", "leave it out, or write seed=VALUE"]),
    "no-key": (["=3"], ["'=3' has no key; write key=value"]),
    "no-number": (
        ["batch_size=auto"],
        ["batch_size=auto: Value 'auto' of type 'str' could not be converted to Integer"],
    ),
    "no-value": (["seed="], ["seed=", "Value '' of type 'str' could not be converted to Integer"]),
    "no-choice": (["attention="], ["there is no attention ''; the choices are alpha_beta,"]),
    "neither-true-nor-false": (["deterministic=maybe"], ["deterministic=maybe", "valid bool"]),
    "several-values": (
        ["seq_len=32,64"],
        ["seq_len=32,64 has several values", "write python train.py -m seq_len=32,64;"],
    ),
    "range-of-values": (
        ["seed=range(0,3)"],
        ["seed=range(0,3) has several values", "write python train.py -m 'seed=range(0,3)';"],
    ),
    "variant-of-no-sweep": (
        ["hydra.sweeper.variants.wide={attention.window:64}"],
        ["names a variant, as a sweep has", "write python train.py -m 'hydra.sweeper.variants."],
    ),
    "no-setting": (["words"], ["cannot read 'words'", "write key=value"]),
    "data-missing": (
        ["data=text", "data.path=/no/such.txt"],
        ["data.path=/no/such.txt does not exist"],
    ),
    "data-unnamed": (["data=text"], ["data.path=FILE"]),
    "last_write-too-short": (["data=last_write", "seq_len=1"], ["seq_len=1"]),
    "recall-too-short": (
        ["data=recall", "seq_len=32", "data.num_pairs=9"],
        ["data=recall with seq_len=32 has no room", "seq_len=36 or more"],
    ),
    "recall-too-few-values": (
        ["data=recall", "data.num_values=4", "data.num_pairs=5"],
        ["data.num_values=4; use data.num_pairs=4 or less"],
    ),
    "pairs-of-last_write": (
        ["data=last_write", "data.num_pairs=2"],
        ["data.num_pairs=2 has no effect", "add data=recall"],
    ),
    "eval_sequences": (
        ["eval_sequences=1000000000"],
        ["1000000000 held-out sequences (eval_sequences=", "held-out tokens; take ", " or fewer"],
    ),
    "project": (
        ["logger=wandb", "logger.mode=offline", "logger.project=a/b"],
        ["logger.project=a/b: wandb takes at most 128 characters, and none of / \\ # ? % :;"],
    ),
    "logger": (["logger=trackio"], ["logger=trackio: there is no logger 'trackio'", "tensorboard"]),
}


@pytest.mark.parametrize("overrides, said", REFUSED.values(), ids=REFUSED)
def test_refused_in_one_line(tmp_path, overrides, said):
    done = run(*tiny(tmp_path, *overrides))
    assert done.code == 1 and "Traceback" not in done.output, done.output
    for words in said:
        assert words in done.complaint()
    assert not (tmp_path / "checkpoint").exists()


# a file in a folder of the user's own: what is in it, and what the answer must contain
RECIPE = "# @package _global_\n"
OWN_FILES = {
    "unknown-key": (
        "attention/mine",
        "name: tiled\nblok_kv: 8\n",
        ["attention/mine.yaml: there is no key 'attention.blok_kv'; did you mean attention.block_"],
    ),
    "type": (
        "attention/mine",
        "name: tiled\nblock_kv: many\n",
        ["attention/mine.yaml: attention.block_kv: Value 'many'", "Integer"],
    ),
    "indentation": (
        "attention/mine",
        "name: tiled\n  block_kv: 8\n",
        ["attention/mine.yaml", "line 2, column 11; indent with spaces"],
    ),
    "encoding": ("attention/mine", "name: \xe9\n", ["not text in UTF-8", "0xe9"]),
    "list": ("attention/mine", "- tiled\n", ["attention/mine.yaml: Merge error: list is not"]),
    "no-name": ("attention/mine", "block_kv: 8\n", ["attention.name is missing", "name: tiled"]),
    "empty": ("attention/mine", "", ["attention.name is missing"]),
    "base": ("attention/mine", "defaults:\n  - tield\n", ["Could not load 'attention/tield'"]),
    "unknown-key-of-a-recipe": (
        "experiment/mine",
        f"{RECIPE}step: 3\n",
        ["experiment/mine.yaml: there is no key 'step'; did you mean steps?"],
    ),
    "recipe-without-package": (
        "experiment/mine",
        "steps: 3\n",
        ["experiment/mine.yaml: its first line must be '# @package _global_'"],
    ),
    "choice-of-a-recipe": (
        "experiment/mine",
        f"{RECIPE}defaults:\n  - attention: tiled\n",
        ["experiment/mine.yaml: write '- override /attention: tiled' in its defaults"],
    ),
    "misspelt-choice-of-a-recipe": (
        "experiment/mine",
        f"{RECIPE}defaults:\n  - override /attention: tield\n",
        ["there is no attention 'tield'; the choices are alpha_beta, custom, "],
    ),
    "sweep-of-a-recipe": (
        "experiment/mine",
        f"{RECIPE}hydra:\n  mode: MULTIRUN\n  sweeper:\n    params: {{sede: '0,1'}}\n",
        ["sede=0, sede=1: there is no key 'sede'; did you mean seed?"],
    ),
}


@pytest.mark.parametrize(("name", "text", "said"), OWN_FILES.values(), ids=OWN_FILES)
def test_a_mistake_in_a_file_of_a_user(tmp_path, name, text, said):
    """A regression test: Hydra printed lines of its own, or PyYAML's traceback."""
    path = tmp_path / "own" / f"{name}.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="latin-1")
    given = name.replace("/", "=")
    done = run(*tiny(tmp_path / "run", f"--config-dir={tmp_path / 'own'}", given))
    assert done.code == 1 and "Traceback" not in done.output, done.output
    for words in said:
        assert words in done.complaint()


def test_a_mistake_in_a_file_that_a_sweep_takes(tmp_path):
    (tmp_path / "attention").mkdir()
    (tmp_path / "attention/mine.yaml").write_text("name: tiled\nblok_kv: 8\n")
    done = run(*tiny_sweep(tmp_path, f"--config-dir={tmp_path}", "attention=naive,mine"))
    assert done.code == 1 and "Traceback" not in done.output, done.output
    assert "attention=mine: attention/mine.yaml: there is no key" in done.complaint()


def test_a_folder_of_ones_own_that_is_none():
    answer = run("--config-dir=/no/such").complaint()
    assert "--config-dir=/no/such is not a folder" in answer


@pytest.mark.parametrize("raised", ["SystemExit(3)", "KeyboardInterrupt"])
def test_a_module_of_a_user_that_ends_the_program(tmp_path, monkeypatch, raised):
    """A regression test: it silently ended a sweep, and KeyboardInterrupt passed for Ctrl-C."""
    (tmp_path / "ends.py").write_text(f"raise {raised}\n")
    monkeypatch.syspath_prepend(tmp_path)
    answer = run(
        *tiny(tmp_path / "run", "attention=custom", "attention.target=ends:BACKEND")
    ).complaint()
    assert raised.partition("(")[0] in answer and (
        "attention=ends:BACKEND" in answer or str(tmp_path / "ends.py") in answer
    )
    assert summary(tmp_path / "run")["status"] == "failed"


def test_a_value_may_follow_another(tmp_path):
    """A regression test: the run's own list of overrides was read as if it were settings."""
    assert run(*tiny(tmp_path, "eval_sequences=${batch_size}", "steps=1")).code == 0
    assert "eval_sequences: 4" in (tmp_path / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("told", "said"),
    [("bogus", "WANDB_MODE=bogus is not one of"), ("shared", "WANDB_MODE=shared lets several")],
)
def test_a_wandb_mode_that_no_run_has(tmp_path, told, said):
    assert said in run(*tiny(tmp_path, "logger=wandb"), WANDB_MODE=told).complaint()
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_backend_that_says_it_is_not_exact_may_train(tmp_path):
    assert (
        run(
            *tiny(tmp_path / "a", "attention=custom", BACKENDS_OF_A_USER + "WRONG_AND_SAYS_SO")
        ).code
        == 0
    )
    assert run(*tiny(tmp_path / "b", "attention=custom", BACKENDS_OF_A_USER + "RIGHT")).code == 0


def test_a_backend_is_handed_the_arguments_it_has_names_for(tmp_path):
    """A regression test: the comparison with exact attention left out unused arguments."""
    assert run(*tiny(tmp_path, "attention=custom", BACKENDS_OF_A_USER + "WINDOWED")).code == 0
    assert metrics(tmp_path)[-1]["attention/out_error"] < 1e-5


def test_a_command_to_resume_is_quoted_for_the_shell(run_dir):
    strange = run_dir.rename(run_dir.with_name("it's a run"))
    answer = run(*tiny(strange)[:-1], f'hydra.run.dir="{strange}"').complaint()
    command = re.search(r"go on with it by (.*), or choose another hydra.run.dir", answer)[1]
    assert (
        shlex.split(command) == [f"resume={strange}"]
        and run(*shlex.split(command), "steps=5").code == 0
    )


def test_a_folder_that_cannot_be_written_to_is_not_said_to_hold_a_run(tmp_path):
    (tmp_path / "file").touch()
    answer = run(*tiny(tmp_path / "file")).complaint()
    assert (
        "cannot be written to" in answer
        and "choose another hydra.run.dir" in answer
        and "resume" not in answer
    )


def test_triton_without_a_gpu_names_the_interpreter_and_tiled(tmp_path):
    answer = run(*tiny(tmp_path, "attention=triton"), TRITON_INTERPRET="0").complaint()
    assert (
        "needs a GPU" in answer and "TRITON_INTERPRET=1" in answer and "attention=tiled" in answer
    )
    answer = run(
        *tiny(tmp_path, "attention=no_max", "attention.impl=triton"), TRITON_INTERPRET="0"
    ).complaint()
    assert "needs a GPU" in answer and "or use attention.impl=tiled" in answer


def test_a_dtype_or_device_that_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "device=cpu" in run(*tiny(tmp_path, "device=cuda")).complaint()
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(
        ValueError, match="dtype=bf16, but Tesla T4 has no bfloat16; use dtype=fp16 or dtype=fp32"
    ):
        pick_dtype("bf16", torch.device("cuda"))
    assert pick_dtype("auto", torch.device("cuda")) == torch.float32


@pytest.mark.parametrize(
    "raw, said",
    [
        (b"", "holds no text"),
        (b"words\0\xff\xfe", "is not UTF-8 text"),
        (b"too short", "seq_len=32 needs 33 tokens"),
    ],
    ids=["empty", "binary", "short"],
)
def test_a_text_that_cannot_be_trained_on(tmp_path, raw, said):
    path = tmp_path / "book.txt"
    path.write_bytes(raw)
    answer = run(*tiny(tmp_path / "run", "data=text", f"data.path={path}")).complaint()
    assert str(path) in answer and said in answer
    assert "seq_len=0 or less" not in answer, "no way out"


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or not Path("/proc/1/mem").exists(),
    reason="needs a file that nobody may read",
)
def test_an_unreadable_text(tmp_path):
    # permissions do not stop root; the memory of another process does
    answer = run(*tiny(tmp_path / "run", "data=text", "data.path=/proc/1/mem")).complaint()
    assert "/proc/1/mem cannot be read" in answer


@pytest.mark.parametrize(
    "overrides", [["tokenizer=gpt2"], ["data=hub", "data.name=nobody/nothing"]], ids=["gpt2", "hub"]
)
def test_no_network_is_said_at_once(tmp_path, overrides):
    closed = "http://127.0.0.1:9"
    begin = time.perf_counter()
    done = run(
        *tiny(tmp_path, *overrides),
        HTTPS_PROXY=closed,
        https_proxy=closed,
        TIKTOKEN_CACHE_DIR=str(tmp_path),
    )
    answer = done.complaint()
    assert overrides[-1].partition("=")[2] in answer and "need no network" in answer
    # the tests switch the hub off before they start
    assert "does not answer" in answer or "HF_HUB_OFFLINE is set" in answer
    assert time.perf_counter() - begin < 10


def test_one_tile_makes_no_rescale_exact_and_says_so(tmp_path):
    done = run(*tiny(tmp_path, "attention=no_rescale", "attention.block_kv=32"))
    assert (
        done.code == 0 and "block_kv=32 covers seq_len=32: no_rescale is exact here" in done.output
    )


# the output folder


@pytest.mark.parametrize("arguments", [tiny, tiny_sweep], ids=["run", "sweep"])
@pytest.mark.parametrize("folder", ["made", pytest.param("written", marks=linux)])
def test_a_folder_that_cannot_be(folder, arguments, tmp_path):
    (tmp_path / "file").touch()
    # permissions do not stop root, but nobody makes a file there
    path = tmp_path / "file/runs" if folder == "made" else Path("/proc/self")
    answer = run(*arguments(path)).complaint()
    assert str(path) in answer and "hydra." in answer


@pytest.mark.parametrize("kind", ["run", "sweep"])
@pytest.mark.parametrize(
    "folder",
    ["", ".", "..", str(ROOT), "${nope:1}"],
    ids=["empty", "here", "above", "ours", "nothing"],
)
def test_a_folder_that_is_not_the_runs_own(kind, folder):
    """A regression test: an empty hydra.run.dir wrote the run between the files of this program."""
    before = sorted(os.listdir(ROOT))
    answer = run(
        *(["-m"] if kind == "sweep" else []), *TINY, f"hydra.{kind}.dir={folder}"
    ).complaint()
    assert f"error: hydra.{kind}.dir" in answer and f"as hydra.{kind}.dir=outputs/NAME" in answer
    assert sorted(os.listdir(ROOT)) == before


def test_a_run_may_be_resumed_from_its_own_folder(run_dir, monkeypatch):
    monkeypatch.setattr("tests.command.ROOT", run_dir)
    shutil.copy(ROOT / "train.py", run_dir / "train.py")
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    os.symlink(ROOT / "conf", run_dir / "conf")
    assert run("resume=.", "steps=5").code == 0


@pytest.mark.parametrize("arguments", [tiny, tiny_sweep], ids=["run", "sweep"])
def test_a_folder_whose_name_is_too_long(arguments, tmp_path):
    answer = run(*arguments(tmp_path / ("a" * 300))).complaint()
    assert "aaa cannot be written to" in answer and "choose another hydra." in answer
    assert "is not a run directory" in run(f"resume={tmp_path / ('a' * 300)}").complaint()


@pytest.mark.parametrize("choice", ["seed=range(5,1)", "seed=range(0,0)"])
def test_a_sweep_without_a_job(tmp_path, choice):
    """A regression test: an empty table, and exit code 0."""
    answer = run(*tiny_sweep(tmp_path / "sweep", choice)).complaint()
    assert f"{choice} has no value to sweep over" in answer and not (tmp_path / "sweep").exists()


def test_jobs_of_a_sweep_do_not_share_a_folder(tmp_path):
    """A regression test: each job wrote its rows into the previous job's file."""
    done = run(*tiny_sweep(tmp_path, "seed=0,1", "steps=1"), "hydra.sweep.subdir=${steps}")
    assert "choose another hydra.sweep.subdir" in done.complaint()
    assert summary(tmp_path / "1")["seed"] == 0 and len(metrics(tmp_path / "1")) == 2


@linux
@pytest.mark.parametrize("arguments", [tiny, tiny_sweep], ids=["run", "sweep"])
def test_a_disk_that_is_full_from_the_start(arguments, tmp_path):
    with largest_file(0):
        done = run(*arguments(tmp_path))
    assert str(tmp_path) in done.complaint()


def test_a_cache_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    answer = run(*tiny(tmp_path / "run"), TILEGPT_CACHE=str(tmp_path / "file/cache")).complaint()
    assert (
        "file/cache" in answer
        and "data.cache_dir=FOLDER" in answer
        and "TILEGPT_CACHE=FOLDER" in answer
    )


@linux
def test_a_disk_that_fills_up_leaves_the_last_checkpoint(run_dir):
    """The weights still fit, the optimizer's state does not."""
    before = checkpoint(run_dir)
    with largest_file(120_000):
        answer = run(f"resume={run_dir}", "steps=8", "checkpoint_every=6").complaint()
    assert f"cannot write a checkpoint to {run_dir}" in answer and "GiB free" in answer
    assert (
        "training.pt could not be written whole; it would fit, so look for a limit on the size of "
        "a file (ulimit -f) or a quota; go on with: python train.py resume=" in answer
    )
    assert (
        f"resume={run_dir}" in answer and "enforce" not in answer and "unexpected pos" not in answer
    )
    assert same(checkpoint(run_dir), before)
    assert run(f"resume={run_dir}", "steps=8").code == 0 and [
        row["step"] for row in metrics(run_dir)
    ] == list(range(9))


@linux
def test_a_disk_that_fills_up_before_the_first_checkpoint(run_dir, tmp_path):
    # run_dir has built the store of tokens
    with largest_file(120_000):
        answer = run(*tiny(tmp_path)).complaint()
    assert f"cannot write a checkpoint to {tmp_path}" in answer and "(ulimit -f)" in answer
    assert "resume=" not in answer, "there is nothing to go on with"


def test_metrics_that_cannot_be_written_name_the_folder(run_dir, monkeypatch):
    def full(self, mode="r", *arguments, **options):
        if self.name == "metrics.jsonl" and mode == "a":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return opened(self, mode, *arguments, **options)

    opened = Path.open
    monkeypatch.setattr(Path, "open", full)
    answer = run(f"resume={run_dir}", "steps=6").complaint()
    assert "No space left" in answer and str(run_dir) in answer


def test_what_cannot_be_written_after_training_is_said(tmp_path):
    (tmp_path / "sample.txt").mkdir()
    done = run(*tiny(tmp_path, "sample_tokens=4"))
    assert str(tmp_path / "sample.txt") in done.output and "Traceback" not in done.output
    assert checkpoint(tmp_path)["step"] == 4


def test_a_summary_that_cannot_be_written_is_a_failure(tmp_path):
    (tmp_path / "summary.json").mkdir()
    assert "summary.json" in run(*tiny(tmp_path)).complaint()


def test_a_folder_with_a_run_in_it_takes_no_other(run_dir):
    """Two runs would mix in one metrics.jsonl, and the first would lose its checkpoint."""
    before = contents(run_dir)
    answer = run(*tiny(run_dir, "seed=1")).complaint()
    assert f"resume={run_dir}" in answer
    assert contents(run_dir) == before


def test_a_time_stamp_that_is_taken_gets_a_number(tmp_path):
    """A regression test: of two runs that were started in the same second, one was refused."""
    for _ in range(3):
        done = run(*tiny(tmp_path, "steps=1")[:-1], f"hydra.run.dir={tmp_path}/${{now:%Y}}")
        assert done.code == 0, done.output
    year, *others = sorted(tmp_path.iterdir())
    assert [path.name for path in others] == [f"{year.name}-2", f"{year.name}-3"]
    assert all(len(metrics(folder)) == 2 for folder in (year, *others))


def test_a_sweep_takes_no_folder_of_another(tmp_path):
    assert run(*tiny_sweep(tmp_path, "seed=0,1", "steps=1")).code == 0
    before = index(tmp_path)
    done = run(*tiny_sweep(tmp_path, "seed=2,3", "steps=1"))
    assert done.code == 1 and "Traceback" not in done.output and str(tmp_path) in done.output
    assert index(tmp_path) == before and summary(tmp_path / "0")["seed"] == 0
