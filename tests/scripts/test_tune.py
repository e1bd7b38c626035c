"""scripts.tune without a GPU: what it would time, and what it says."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from attention.kernels.launch import TILES, VARIANTS, tables
from scripts.tune import candidates, write_tables
from tests import processes

ROOT = Path(__file__).parents[2]


def tune(*arguments: str, interpret: str = "0") -> subprocess.CompletedProcess:
    environment = os.environ | {"TRITON_INTERPRET": interpret, "CUDA_VISIBLE_DEVICES": ""}
    return processes.run("-m", "scripts.tune", *arguments, env=environment)


def test_the_tiles_in_force_are_among_the_candidates():
    for kernel in VARIANTS:
        for head_dim in (64, 128):
            assert tuple(tables()["sm_90"]["16-bit"][kernel][str(head_dim)]) in set(
                candidates(kernel, head_dim)
            )


def test_the_file_is_kept_as_it_is_written(tmp_path):
    write_tables(tmp_path / "tiles.json")
    assert (tmp_path / "tiles.json").read_text() == TILES.read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of a machine without a GPU")
def test_help_and_complaints():
    shown = tune("--help").stdout
    example = re.search(r"^    python -m scripts\.tune (.*)$", shown, re.MULTILINE)[1]
    complaint = "tune: tiles are timed on a GPU, and there is none\n"
    assert tune(*example.split()).stderr == complaint
    assert "TRITON_INTERPRET=1 is set" in tune(interpret="1").stderr
