"""The findings of docs/findings/, in small."""

import json

import pytest

from lab.findings import lazy_rescaling


def test_lazy_rescaling_breaks_where_the_dtype_ends(tmp_path):
    out = tmp_path / "lazy.json"
    sizes = ["lengths=256", "thresholds=0,8,9,10", "offsets=0", "seeds=0"]
    lazy_rescaling.main([*sizes, f"out={out}"])
    regions = {each["dtype"]: each for each in json.loads(out.read_text())["regions"]}
    assert (regions["e4m3"]["last_safe"], regions["e4m3"]["first_broken"]) == (8, 9)
    assert all(regions[name]["first_broken"] is None for name in ("fp16", "bf16", "e5m2"))
    assert out.with_name("lazy.png").is_file()


def test_it_needs_a_threshold_to_compare_with():
    with pytest.raises(SystemExit, match="thresholds= needs 0"):
        lazy_rescaling.main(["thresholds=8"])
