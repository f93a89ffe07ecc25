"""oneDNN's verbose lines, of several versions, and what they prove."""

from __future__ import annotations

import pytest

from jobs.worker.bench import onednn
from jobs.worker.bench.onednn import OneDnn, ask_onednn, parse_verbose

_ISA = (
    "Intel AVX-512 with float16, Intel DL Boost and bfloat16 support and Intel AMX with bfloat16 "
    "and 8-bit integer support"
)
_HEAD = (
    "onednn_verbose,v1,info,oneDNN v3.12.0 (commit 80afa71049cd69a3df32adcccb623b12cd7baa22)",
    "onednn_verbose,v1,info,cpu,runtime:OpenMP,nthr:32",
    f"onednn_verbose,v1,info,cpu,isa:{_ISA}",
    "onednn_verbose,v1,primitive,info,template:operation,engine,primitive,implementation,prop_kind,"
    "memory_descriptors,attributes,auxiliary,problem_desc,exec_time",
)
_AMX = (
    "onednn_verbose,v1,primitive,exec,cpu,matmul,brg_matmul:avx10_1_512_amx,undef,"
    "src:bf16::blocked:ab::f0 wei:bf16::blocked:ab::f0 dst:bf16::blocked:ab::f0,attr-scratchpad:user,,"
    "256x256:256x256,0.0688477"
)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (_AMX, "brg_matmul:avx10_1_512_amx"),
        (
            "onednn_verbose,primitive,exec,cpu,matmul,brg:avx512_core_amx,undef,src_bf16::blocked:"
            "ab::f0 wei_bf16::blocked:ba::f0 dst_bf16::blocked:ab::f0,attr-scratchpad:user ,,256x11008",
            "brg:avx512_core_amx",
        ),
        (
            "onednn_verbose,exec,cpu,matmul,brg:avx512_core_amx_bf16,undef,src_bf16::blocked:ab:f0 "
            "wei_bf16::blocked:ab:f0 dst_bf16::blocked:ab:f0,attr-scratchpad:user ,,256x256:256x256,1",
            "brg:avx512_core_amx_bf16",
        ),
        (
            "dnnl_verbose,exec,cpu,inner_product,brgemm:avx512_core_bf16_amx_bf16,forward_training,"
            "src_bf16::blocked:ab:f0 wei_bf16::blocked:ab:f0,,,mb256ic256oc256,0.1",
            "brgemm:avx512_core_bf16_amx_bf16",
        ),
    ],
    ids=["3.12", "3.3", "2.7", "1.x"],
)
def test_amx_ran(line: str, name: str) -> None:
    said = parse_verbose([*_HEAD, line])

    assert said == OneDnn(_ISA, (name,))
    assert said.amx
    assert said.verdict == f"AMX ran ({name})"


@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        ("", f"no AMX ({_ISA}; oneDNN ran nothing in bf16)"),
        (
            _AMX.replace("avx10_1_512_amx", "avx512_core_bf16"),
            "no AMX (bf16 ran as brg_matmul:avx512_core_bf16)",
        ),
        # It was considered, and not taken.
        (
            "onednn_verbose,v1,primitive,create:dispatch,matmul,cpu,matmul,brg_matmul:"
            "avx10_1_512_amx_fp16,undef,src:bf16:a:any:any::f0 wei:bf16:a:any:any::f0,,,256x256:"
            "256x256,unsupported isa,src/cpu/x64/matmul/brgemm_matmul.cpp:101",
            f"no AMX ({_ISA}; oneDNN ran nothing in bf16)",
        ),
        (
            _AMX.replace("exec,", "create:cache_miss,"),
            f"no AMX ({_ISA}; oneDNN ran nothing in bf16)",
        ),
        # In eight-bit integers, and copying: neither is a product in bf16.
        (_AMX.replace("bf16", "s8"), f"no AMX ({_ISA}; oneDNN ran nothing in bf16)"),
        (
            _AMX.replace(",matmul,brg_matmul:", ",reorder,jit:"),
            f"no AMX ({_ISA}; oneDNN ran nothing in bf16)",
        ),
        (f"# {_AMX}", f"no AMX ({_ISA}; oneDNN ran nothing in bf16)"),
    ],
    ids=["flags alone", "avx512", "dispatch", "create", "int8", "reorder", "quoted"],
)
def test_cpu_flags_alone_are_not_amx(line: str, verdict: str) -> None:
    said = parse_verbose([*_HEAD, line])

    assert not said.amx
    assert said.verdict == verdict
    assert "ok" not in said.verdict.split()


def test_a_processor_without_bf16() -> None:
    ran = (
        "onednn_verbose,v1,primitive,exec,cpu,inner_product,brg_matmul:avx2,forward_inference,src:f32"
        "::blocked:ab::f0 wei:f32::blocked:ab::f0 dst:f32::blocked:ab::f0,attr-scratchpad:user,,mb512,4"
    )
    said = parse_verbose(["onednn_verbose,v1,info,cpu,isa:Intel AVX2", ran])

    assert said == OneDnn("Intel AVX2", (), ("brg_matmul:avx2",))
    assert said.verdict == "no AMX (Intel AVX2; oneDNN ran nothing in bf16)"


def test_no_output_is_no_amx() -> None:
    assert parse_verbose([]).verdict == "no AMX (oneDNN reported nothing)"


def test_the_probe_runs_without_mpiruns_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    probe = f"import os; print({_AMX!r} if os.environ['ONEDNN_VERBOSE'] == '1' else '', os.environ)"
    monkeypatch.setattr(onednn, "_PROBE", f"{probe}; assert 'PMI_FD' not in os.environ")

    assert ask_onednn({"PMI_FD": "7", "PATH": "/bin"}).amx


def test_a_probe_that_hangs_reports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "_PROBE", "import time; time.sleep(60)")
    monkeypatch.setattr(onednn, "_TIMEOUT_S", 0.1)

    assert ask_onednn({}) == OneDnn()
