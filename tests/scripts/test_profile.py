"""`python -m scripts.profile`: the part of every kernel by its real name, a table that adds up, and
one line for what can be wrong.
"""

import gzip
import json
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from scripts import profile
from scripts.profile_trace import (
    ATTENTION,
    BACKWARD,
    DATA,
    ELEMENTWISE,
    FORWARD,
    GAPS,
    LOSS,
    MESSAGES,
    OPTIMIZER,
    OTHER,
    PARTS,
    PRODUCTS,
    Trace,
    part_of,
    parts_of_steps,
)
from tests import forked
from tests.command import environment

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "device=cpu",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.hidden_size=32",
    "seq_len=32",
    "batch_size=4",
    "steps=2",
    "warmup=1",
)

# as profilers print them: Triton's and Gluon's, cuBLAS, CUTLASS, cuDNN, FlashAttention, Inductor
# and PyTorch's own
KERNELS = {
    FORWARD: [
        "intervals_kernel",
        "block_starts_kernel",
        "forward_kernel",
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, "
        "128, 4, false, false, cutlass::bfloat16_t> >",
        "void flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<(int)128, (int)64, (int)128, "
        "(int)4>>",
        "void cutlass::device_kernel<flash::FlashAttnFwdSm90"
        "<flash::CollectiveMainloopFwdSm90<2> > >",
        "flash::FlashAttentionForwardSm100",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1_kernel0_0",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>::Params)",
        "triton_tem_fused_flex_attention_transpose_view_0",
    ],
    BACKWARD: [
        "query_ranges_kernel",
        "delta_kernel",
        "dkdv_kernel",
        "dq_kernel",
        "void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128, 64, 64, "
        "8, 4, 2, 2, true, false> >",
        "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, "
        "pytorch_flash::Flash_bwd_kernel_traits<64, 128, 128, 8, 4, 4, 4> >",
        "void pytorch_flash::flash_bwd_convert_dq_kernel"
        "<pytorch_flash::Flash_bwd_kernel_traits<64, 128, 128, 8, 4, 4, 4> >",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x4x1_cga1x1x1_kernel0_0",
        "void cudnn::fusion::compute_dot_do_o_specialized<true, 64>(__nv_bfloat16 const*, "
        "__nv_bfloat16 const*, float*)",
        "void cudnn::fusion::convert_dq_to_16bits<true>(void const*)",
        "void cudnn::fusion::fmha_reduce_head<true>(void const*)",
        "fmha_cutlassB_bf16_aligned_128x64_k64_sm80(PyTorchMemEffAttention::AttentionBackwardKernel<cutlass::bfloat16_t>::Params)",
        "triton_tem_fused_flex_attention_backward_transpose_view_3",
    ],
    PRODUCTS: [
        "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NNT",
        "nvjet_tst_64x64_64x8_2x1_v_bz_splitK_TNT",
        "nvjet_hsh_256x128_64x4_1x2_h_bz_coopB_TNT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
        "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_64x3_tn",
        "void cutlass::Kernel2"
        "<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nn_align8>(Params)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, "
        "__nv_bfloat16, false>",
        "volta_sgemm_128x64_nn",
        "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false>",
        "triton_tem_fused_addmm_7",
    ],
    ELEMENTWISE: [
        "triton_per_fused__to_copy_add_native_layer_norm_3",
        "triton_poi_fused_gelu_5",
        "triton_red_fused_native_layer_norm_backward_12",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float, "
        "false>(int, float)",
        "void at::native::vectorized_elementwise_kernel<4, "
        "at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&, at::native::GeluType)>",
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long, unsigned int, "
        "2, 2, -2, true>",
        "Memset (Device)",
    ],
    LOSS: [
        "triton_red_fused__log_softmax__to_copy_nll_loss_forward_9",
        "triton_red_fused__log_softmax__log_softmax_backward_data_nll_loss_backward_1",
        "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, "
        "float, long>",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float, "
        "LogSoftMaxForwardEpilogue>",
    ],
    OPTIMIZER: [
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous "
        "namespace)::"
        "FusedOptimizerTensorListMetadata<4>, at::native::(anonymous "
        "namespace)::FusedAdamMathFunctor<float, 4, (ADAM_MODE)1, false> >",
    ],
    DATA: ["Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD (Pageable -> Device)"],
}


@pytest.mark.parametrize(
    ("name", "part"), [(name, part) for part, names in KERNELS.items() for name in names]
)
def test_a_kernel_by_its_name(name, part):
    backward = part == BACKWARD or "backward" in name
    assert part_of(name, [], phase="backward" if backward else "forward") == part


def node(name: str) -> str:
    return f"autograd::engine::evaluate_function: {name}Backward0"


@pytest.mark.parametrize(
    ("kernel", "operators", "gradient_of", "phase", "part"),
    [
        # our operator and what it launches around its kernels
        (
            "forward_kernel",
            ["tilegpt::flash_attention", "Torch-Compiled Region: 0/0"],
            [],
            "forward",
            FORWARD,
        ),
        (
            "triton_poi_fused_copy_0",
            ["aten::copy_", "tilegpt::flash_attention"],
            [],
            "forward",
            FORWARD,
        ),
        (
            "Memset (Device)",
            ["aten::zero_", "tilegpt::flash_attention_backward"],
            [],
            "backward",
            BACKWARD,
        ),
        (
            "vectorized_elementwise_kernel",
            ["aten::exp", "tilegpt::tile_loop"],
            [],
            "forward",
            FORWARD,
        ),
        (
            "vectorized_elementwise_kernel",
            ["aten::mul", "tilegpt::tile_loop_backward"],
            [],
            "backward",
            BACKWARD,
        ),
        # attention of plain operators, in its range and by its number in the backward pass
        (
            "ampere_sgemm_128x64_nn",
            ["aten::bmm", "aten::matmul", ATTENTION, "forward"],
            [],
            "forward",
            FORWARD,
        ),
        ("softmax_warp_forward", ["aten::_softmax", ATTENTION], [], "forward", FORWARD),
        (
            "softmax_warp_backward",
            ["aten::_softmax_backward_data", node("Softmax")],
            ["aten::_softmax", ATTENTION],
            "backward",
            BACKWARD,
        ),
        # and compiled: no range, but only attention multiplies stacks of matrices
        ("nvjet_tst_128x128_64x4_1x2_h_bz_NNT", ["aten::bmm"], [], "backward", BACKWARD),
        # a checkpoint repeats the call during the backward pass, and then takes its gradient
        (
            "ampere_sgemm_128x64_nn",
            ["aten::bmm", ATTENTION, node("Checkpoint")],
            [],
            "backward",
            FORWARD,
        ),
        (
            "",
            ["aten::_scaled_dot_product_flash_attention_for_cpu_backward"],
            [],
            "backward",
            BACKWARD,
        ),
        (
            "",
            ["aten::_scaled_dot_product_flash_attention_for_cpu", ATTENTION],
            [],
            "forward",
            FORWARD,
        ),
        # linear layers, whoever asks for the product
        ("", ["aten::addmm", "aten::linear"], [], "forward", PRODUCTS),
        ("", ["aten::mm", node("Addmm")], ["aten::addmm", "aten::linear"], "backward", PRODUCTS),
        ("", ["aten::mm", "LinearCrossEntropy"], [], "forward", PRODUCTS),
        ("", ["aten::exp_", "LinearCrossEntropy"], [], "forward", LOSS),
        (
            "",
            ["aten::_log_softmax_backward_data", node("LogSoftmax")],
            ["aten::_log_softmax"],
            "backward",
            LOSS,
        ),
        ("", ["aten::native_layer_norm"], [], "forward", ELEMENTWISE),
        # Muon's products are the optimizer's
        (
            "nvjet_tst_128x64_64x4_1x2_h_bz_NNT",
            ["aten::mm", "Optimizer.step#Muon.step"],
            [],
            "optimizer",
            OPTIMIZER,
        ),
        (
            "multi_tensor_apply_kernel<LpNormFunctor>",
            ["aten::_foreach_norm"],
            [],
            "optimizer",
            OPTIMIZER,
        ),
        # the thread that reads ahead copies whenever it comes to it
        ("Memcpy HtoD (Pinned -> Device)", ["aten::copy_"], [], "optimizer", DATA),
        ("Memcpy DtoD (Device -> Device)", ["aten::copy_"], [], "", OTHER),
    ],
)
def test_a_kernel_by_where_it_was_launched(kernel, operators, gradient_of, phase, part):
    assert part_of(kernel, operators, gradient_of, phase) == part


@pytest.mark.parametrize("ahead", [False, True], ids=["in order", "ahead"])
def test_the_time_of_a_gpu_is_split_without_rest_or_overlap(ahead):
    """Two whole steps and the third that ends the second; microseconds, the GPU 5 behind the host,
    the gradients from another thread.

    host     data 0-20 | forward 20-40 | backward 40-90 | optimizer 90-100
    stream        forward_kernel 25-45, mm 45-65, dq_kernel 70-80, adam 80-95, and a copy 60-75
                  beside them

    ahead: the forward pass also sends a copy that is over during the step before, and the first
    step finds a kernel of the time before.
    """
    events, number = [], 0

    def event(cat: str, name: str, start: float, stop: float, tid: int = 1, **args) -> None:
        events.append(
            {
                "ph": "X",
                "cat": cat,
                "name": name,
                "ts": start,
                "dur": stop - start,
                "tid": tid,
                "args": args,
            }
        )

    def launch(
        name: str, at: float, start: float, stop: float, tid: int = 1, cat: str = "kernel"
    ) -> None:
        nonlocal number
        number += 1
        event("cuda_runtime", "cudaLaunchKernel", at, at + 1, tid, correlation=number)
        event(cat, name, start, stop, 7, correlation=number)

    for step in range(3):
        t = 100.0 * step
        event("user_annotation", "step", t, t + 100)
        for name, start, stop in (
            ("data", 0, 20),
            ("forward", 20, 40),
            ("backward", 40, 90),
            ("optimizer", 90, 100),
        ):
            event("user_annotation", name, t + start, t + stop)
        event("cpu_op", "aten::mm", t + 41, t + 43, 2)
        if ahead:
            launch("Memcpy HtoD (Pinned -> Device)", t + 21, t - 30, t - 25, cat="gpu_memcpy")
        launch("forward_kernel", t + 22, t + 25, t + 45)
        launch("gemm", t + 42, t + 45, t + 65, tid=2)
        launch("Memcpy HtoD (Pinned -> Device)", t + 50, t + 60, t + 75, tid=3, cat="gpu_memcpy")
        launch("dq_kernel", t + 60, t + 70, t + 80, tid=2)
        launch("ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)", t + 70, t + 90, t + 98)
        launch("multi_tensor_apply_kernel", t + 91, t + 80, t + 95)
    if ahead:
        event("kernel", "multi_tensor_apply_kernel", 21, 23, 7, correlation=-1)
    steps, on_gpu = parts_of_steps(events)
    assert on_gpu and len(steps) == 2
    # from the forward kernel of one step, at 25, to that of the next; the copy is data only where
    # nothing else runs, from 65 to 75; the message runs alone from 95 to 98
    expected = {FORWARD: 20, PRODUCTS: 20, DATA: 10 + 20, BACKWARD: 5, OPTIMIZER: 15, MESSAGES: 3}
    expected[GAPS] = 2 + 5
    for parts in steps:
        assert {part: round(1000 * ms, 6) for part, ms in parts.items() if ms} == expected
        assert sum(parts.values()) == pytest.approx(0.1)


def test_the_time_of_a_cpu_is_each_operator_s_own():
    """A compiled step: what is generated for it counts as operators, what surrounds it as
    Python.
    """
    events = [
        {
            "ph": "X",
            "cat": "user_annotation" if " " not in name and "_" not in name else "cpu_op",
            "name": name,
            "ts": at,
            "dur": dur,
            "tid": 1,
        }
        for name, at, dur in [
            ("step", 0, 1000),
            ("data", 0, 100),
            ("forward", 100, 400),
            ("Torch-Compiled Region: 0/0", 110, 380),
            ("graph_0_cpp_fused_gelu_view_3", 120, 50),
            ("aten::addmm", 200, 100),
            ("graph_0_cpp_fused__log_softmax_nll_loss_forward_4", 300, 20),
            ("optimizer", 600, 300),
            ("Optimizer.step#AdamW.step", 610, 200),
            ("aten::_fused_adamw_", 620, 100),
        ]
    ]
    ((parts,), on_gpu) = parts_of_steps(events)
    assert not on_gpu and sum(parts.values()) == pytest.approx(1.0)
    expected = {
        DATA: 100,
        ELEMENTWISE: 50,
        PRODUCTS: 100,
        LOSS: 20,
        OPTIMIZER: 300,
        GAPS: 20 + 210 + 100 + 100,
    }
    assert {part: round(1000 * ms, 6) for part, ms in parts.items() if ms} == expected


def test_a_trace_without_steps_is_refused():
    with pytest.raises(ValueError, match="no range named 'step'"):
        parts_of_steps(
            [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 1, "tid": 1}]
        )


@pytest.fixture
def run_profile(monkeypatch, capsys, tmp_path):
    """run_profile("key=value", ...): what it printed; SystemExit carries its complaint."""
    monkeypatch.setenv("TILEGPT_CACHE", environment()["TILEGPT_CACHE"])

    def run(*arguments: str) -> str:
        values = {
            argument.partition("=")[0]: argument
            for argument in (*SMALL, f"out={tmp_path / 'out'}", *arguments)
        }
        monkeypatch.setattr(sys, "argv", ["profile", *values.values()])
        profile.main()
        return capsys.readouterr().out

    return run


def parts_by_operator(path: Path) -> dict[str, set[str]]:
    """The parts that each operator of a trace fell into, with " backward" after the name where it
    computed a gradient.
    """
    trace = Trace.read(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])
    main, found = trace.steps()[0].thread, defaultdict(set)
    for each in trace.ranges[main]:
        names = [outer.name for outer in each.stack()]
        phase = next(
            (name for name in names if name in ("data", "forward", "backward", "optimizer")), ""
        )
        if each.name.startswith("aten::") and "step" in names:
            found[each.name + (" backward" if phase == "backward" else "")].add(
                trace.part("", each, phase)
            )
    return found


@pytest.mark.parametrize("attention", ["naive", "sdpa"])
def test_real_operators_fall_into_their_parts(run_profile, tmp_path, attention):
    run_profile(f"attention={attention}")
    found = parts_by_operator(tmp_path / "out/trace.json.gz")
    flash = "aten::_scaled_dot_product_flash_attention_for_cpu"
    own = {
        "naive": {
            "aten::bmm": FORWARD,
            "aten::bmm backward": BACKWARD,
            "aten::softmax": FORWARD,
            "aten::_softmax_backward_data backward": BACKWARD,
        },
        "sdpa": {flash: FORWARD, f"{flash}_backward backward": BACKWARD},
    }[attention]
    expected = own | {
        "aten::linear": PRODUCTS,
        "aten::native_layer_norm": ELEMENTWISE,
        "aten::native_layer_norm_backward backward": ELEMENTWISE,
        "aten::gelu": ELEMENTWISE,
        "aten::gelu_backward backward": ELEMENTWISE,
        "aten::embedding": ELEMENTWISE,
        "aten::_fused_adamw_": OPTIMIZER,
    }
    assert {name: found[name] for name in expected} == {
        name: {part} for name, part in expected.items()
    }
    assert found["aten::mm backward"] == {PRODUCTS}


def test_the_parts_add_up_to_the_step(run_profile, tmp_path):
    output = run_profile("optim=muon", "tokens_per_step=256")
    data = json.loads((tmp_path / "out/profile.json").read_text())
    *parts, step = data["parts"]
    assert [row["part"] for row in parts] == list(PARTS) and step["share"] == pytest.approx(1)
    assert sum(row["ms"] for row in parts) == pytest.approx(step["ms"])
    trace = Trace.read(
        json.loads(gzip.decompress((tmp_path / "out/trace.json.gz").read_bytes()))["traceEvents"]
    )
    recorded = [(each.stop - each.start) / 1000 for each in trace.steps()]
    assert len(recorded) == 3 and step["ms"] == pytest.approx(sum(recorded[:2]) / 2, rel=1e-3)
    by_part = {row["part"]: row["ms"] for row in parts}
    assert all(
        by_part[part] > 0
        for part in (FORWARD, BACKWARD, PRODUCTS, ELEMENTWISE, OPTIMIZER, DATA, GAPS)
    )
    assert (
        data["n"] == 2
        and data["unrecorded_ms"] > 0
        and data["compiled"] is False
        and data["optim"] == "muon"
    )
    assert {"hardware", "versions", "commit"} <= data["environment"].keys() and str(
        tmp_path
    ) not in json.dumps(data)
    assert f"unrecorded: {data['unrecorded_ms']:,.3f} ms a step" in output


@pytest.mark.slow
def test_the_line_of_the_help_runs_as_typed(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["profile", "--help"])
    profile.main()
    line = re.search(r"python -m (scripts\.profile .*)", capsys.readouterr().out)[1]
    done = forked.run("-m", *line.split(), f"out={tmp_path}", env=environment())
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert re.search(r"^step +[\d.,]+ +[\d.,]+ +100\.0%$", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["model=gpt3"], "gpt2"),
        (["modl=gpt2"], "modl"),
        (["steps=none"], "steps=none"),
        (["warmup=0"], "warmup=0"),
        (["out="], "out="),
        (["resume=outputs/x"], "resume=outputs/x"),
        (["batch_size=auto", "tokens_per_step=256"], "batch_size=auto"),
        (["attention=naive", "attention.block_q=16"], "block_q"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_refused_in_one_line(run_profile, arguments, words):
    with pytest.raises(SystemExit) as error:
        run_profile(*arguments)
    message = str(error.value)
    assert message.startswith("profile: ") and words in message and "\n" not in message


def test_a_run_that_diverges_is_not_measured(run_profile):
    with pytest.raises(SystemExit, match="nothing to measure"):
        run_profile("model.init_std=1e18")


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["triton", "sdpa", "naive"])
@pytest.mark.parametrize("compiled", ["true", "false"])
def test_the_time_of_a_real_gpu(run_profile, tmp_path, attention, compiled):
    """The parts add up to about the time of a step that nobody records, and attention is seen
    whoever computes it.
    """
    size = ("device=cuda", "model=small", "seq_len=1024", "batch_size=8", "steps=5", "warmup=5")
    torch._dynamo.reset()
    run_profile(
        *size,
        "model.num_layers=2",
        "model.num_heads=6",
        "model.hidden_size=384",
        f"attention={attention}",
        f"compile={compiled}",
    )
    data = json.loads((tmp_path / "out/profile.json").read_text())
    *parts, step = data["parts"]
    by_part = {row["part"]: row["ms"] for row in parts}
    assert sum(by_part.values()) == pytest.approx(step["ms"])
    assert data["unrecorded_ms"] * 0.7 < step["ms"] < data["unrecorded_ms"] * 3
    assert (
        data["unrecorded_stdev_ms"] < 0.5 * data["unrecorded_ms"]
        and step["stdev_ms"] < 0.5 * step["ms"]
    )
    for part in (FORWARD, BACKWARD, PRODUCTS, ELEMENTWISE, OPTIMIZER):
        assert by_part[part] > 0, part
    assert by_part[OTHER] < 0.1 * step["ms"]
