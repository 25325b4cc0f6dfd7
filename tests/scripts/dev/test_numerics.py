"""The runner of the tests of arithmetic: which settings a CPU gets, and that one failure is not lost among them."""

from pathlib import Path

import pytest

from dev import numerics

ROOT = Path(__file__).resolve().parents[3]

OLD = {"sse4_2", "avx"}
HASWELL = OLD | {"avx2", "fma"}
SKYLAKE = HASWELL | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
KNIGHTS_LANDING = HASWELL | {"avx512f", "avx512er"}


@pytest.mark.parametrize(
    "flags,kernels",
    [
        (set(), ["SSE"]),
        (OLD, ["SSE"]),
        (HASWELL, ["SSE", "AVX2"]),
        (KNIGHTS_LANDING, ["SSE", "AVX2"]),
        (SKYLAKE, ["SSE", "AVX2", "AVX-512"]),
    ],
)
def test_a_cpu_gets_the_settings_it_has_each_with_one_and_two_threads(flags, kernels):
    found = list(numerics.settings(flags))
    assert [name.split(",")[0] for name, _ in found] == [name for name in kernels for _ in range(2)]
    assert len({name for name, _ in found}) == len(found)
    for name in kernels:
        threads = {held["OMP_NUM_THREADS"]: held["ATEN_CPU_CAPABILITY"] for key, held in found if key.startswith(name)}
        assert threads == {"1": "default", "2": numerics.KERNELS[name].capability}


def test_what_is_listed_exists():
    assert [path for path in numerics.TESTS if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("code", [0, 1, 5])
def test_each_setting_is_run_and_one_that_does_not_pass_fails_all(monkeypatch, capsys, code):
    seen = []

    def stand_in(command, env, **kwargs):
        seen.append((env["MKL_CBWR"], env["ATEN_CPU_CAPABILITY"], env["OMP_NUM_THREADS"], command[-1]))
        bad = env["MKL_CBWR"] == "AVX2" and env["OMP_NUM_THREADS"] == "1"
        closing = "a traceback\n1 failed, 2 passed in 1.50s\n" if bad and code else "3 passed in 1.25s\n"
        return numerics.subprocess.CompletedProcess(command, code if bad else 0, closing)

    monkeypatch.setattr(numerics, "cpu_flags", lambda text: HASWELL)
    monkeypatch.setattr(numerics.subprocess, "run", stand_in)
    assert numerics.main(["tests/x.py"]) == (1 if code else 0)
    assert seen == [
        ("COMPATIBLE", "default", "1", "tests/x.py"),
        ("COMPATIBLE", "default", "2", "tests/x.py"),
        ("AVX2", "default", "1", "tests/x.py"),
        ("AVX2", "avx2", "2", "tests/x.py"),
    ]
    out = capsys.readouterr().out
    assert "AVX-512: skipped" in out and "avx512f" in out
    assert ("a traceback" in out) == ("AVX2, 1 thread, ATen default: 1 failed, 2 passed in 1.50s" in out) == bool(code)
    assert "AVX2, 2 threads, ATen avx2: 3 passed in 1.25s" in out
