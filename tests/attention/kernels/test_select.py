"""Which kernels attention=triton runs, and why."""

import pytest
import torch

from attention import attention, get_backend, kernel_choice
from attention.kernels.select import choose_kernel, obstacle_of_the_place, why_not_hopper

H200 = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "head_dim": 64}
SOFTCAP, ALIBI = (f"attention.kernels.score_mods:{name}" for name in ("softcap", "alibi"))


@pytest.fixture
def on_an_h200(monkeypatch, tmp_path):
    """This machine as one with an H200; call it to install another Triton."""

    def install(release: str) -> None:
        metadata = tmp_path / release / f"triton-{release}.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: triton\nVersion: {release}\n")
        monkeypatch.syspath_prepend(metadata.parents[1])

    obstacle_of_the_place.cache_clear()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    install("3.6.0")
    yield install
    obstacle_of_the_place.cache_clear()


@pytest.mark.parametrize(
    ("asked", "change", "chosen", "reason"),
    [
        ("portable", {}, "portable", "asked for"),
        ("hopper", {}, "hopper", "asked for"),
        ("auto", {}, "hopper", ""),
        ("auto", {"dtype": torch.float16, "head_dim": 128}, "hopper", ""),
        ("auto", {"device": torch.device("cpu")}, "portable", "cpu"),
        ("auto", {"dtype": torch.float32}, "portable", "float32"),
        ("auto", {"head_dim": 96}, "portable", "96"),
        ("auto", {"softmax": "no_max"}, "portable", "broken softmax"),
        ("auto", {"block_kv": 64}, "portable", "block_q"),
        ("auto", {"scale": -1.0}, "portable", "-1.0"),
        ("auto", {"score_mod": SOFTCAP}, "portable", "softcap"),
        ("hopper", {"score_mod": SOFTCAP}, "hopper", ""),
        ("auto", {"score_mod": ALIBI}, "hopper", ""),
    ],
)
def test_the_choice_and_its_reason(asked, change, chosen, reason, on_an_h200):
    """As a run writes them into its log."""
    choice = choose_kernel(asked, **H200 | change)
    assert choice.kernel == chosen and reason in choice.reason
    backend = get_backend("triton", kernel=asked)
    assert kernel_choice(backend, **H200 | change) == choice
    assert kernel_choice(get_backend("tiled"), **H200) is None


def test_devices_of_the_hopper_kernels(on_an_h200, monkeypatch):
    on_an_h200("3.9.0")
    assert "3.9.0" in why_not_hopper(**H200)
    obstacle_of_the_place.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "sm_80" in why_not_hopper(**H200)
    obstacle_of_the_place.cache_clear()
    monkeypatch.setattr(torch.version, "cuda", None)  # as on AMD's
    assert "NVIDIA" in why_not_hopper(**H200)


def test_a_refusal_names_the_reason_and_the_way_out(on_an_h200):
    with pytest.raises(ValueError, match="kernel=hopper .* 96; .*kernel=auto"):
        choose_kernel("hopper", **H200 | {"head_dim": 96})
    q = torch.zeros(1, 1, 4, 64)
    with pytest.raises(ValueError, match="kernel=hopper .* cpu"):
        attention(q, q, q, backend=get_backend("triton", kernel="hopper"))
